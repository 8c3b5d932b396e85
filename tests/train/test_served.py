"""The first law with servers: gathered rounds equal one process and the ring, whoever steps, however many serve."""

import pytest
import torch

from tests.train.recommender import Recommender
from tests.train.serving import train
from tests.train.test_equivalence import MORE, assert_equal_to_reference, part_of, reference, settings
from tests.train.toys import Deep, Masked, Unused, WithFrozen, run

MORE |= {"recommender": Recommender(), "padded": Recommender(padded=True)}
TASKS = {"masked": Masked(), "deep": Deep(), "unused": Unused(), "frozen": WithFrozen(), **MORE}
LAYOUTS = [(workers, servers) for servers in (1, 2, 3) for workers in (1, 2, 3, 7) if workers + servers <= 8]
OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad")


@pytest.mark.mpi
@pytest.mark.parametrize("optimizer", (*OPTIMIZERS, "adamw"))
def test_tables_along_the_ring_equal_those_of_one_process(comm, optimizer):
    for ranks in {1, min(3, comm.size), comm.size}:
        part = part_of(comm, ranks)
        if part is None:
            continue
        for task, clip in (("recommender", None), ("padded", 0.1)):
            how = {"clip_norm": clip, "num_microbatches": 2}
            losses, weights, _ = run(TASKS[task], part, **how, **settings(optimizer, 13))
            assert_equal_to_reference(losses, weights, task, optimizer, 13, clip_norm=clip)
        part.Free()


def check(comm, task, workers, servers, optimizer, **how):
    """Whether a layout equals one process; twice the same bits."""
    runs = [
        train(comm, TASKS[task], workers, servers, **how, **settings(optimizer, 13)) for _ in range(how.pop("times", 1))
    ]
    if runs[0] is None:
        return
    losses, weights, _ = runs[0]
    if weights is None:
        return  # a server
    same = {name: value for name, value in how.items() if name in ("clip_norm", "table_optimizer")}
    losses = losses or reference(task, optimizer, 13, **same)[0]  # of a round only rank 0 hears
    assert_equal_to_reference(losses, weights, task, optimizer, 13, **same)
    for other in runs[1:]:
        assert all(torch.equal(weights[name], other[1][name]) for name in weights)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("update", ("server", "worker"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers, servers", LAYOUTS)
def test_gathered_rounds_equal_one_process(comm, workers, servers, optimizer, update):
    if workers + servers > comm.size:
        pytest.skip(f"needs {workers + servers} ranks")
    for task in ("masked", "recommender"):
        check(comm, task, workers, servers, optimizer, update=update)
