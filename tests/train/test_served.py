"""The first law with servers: gathered rounds equal one process and the ring, whoever steps, however many serve."""

import pytest
import torch

from tests.train.recommender import Recommender, TablesAlone
from tests.train.serving import train
from tests.train.test_equivalence import MORE, assert_equal_to_reference, part_of, reference, settings
from tests.train.test_equivalence import TASKS as OURS
from tests.train.toys import run

MORE |= {"recommender": Recommender(), "padded": Recommender(padded=True), "alone": TablesAlone()}
TASKS = {**OURS, **MORE}
LAYOUTS = [(workers, servers) for servers in (1, 2, 3) for workers in (1, 2, 3, 7) if workers + servers <= 8]
OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad")


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda optimizer: optimizer in ("momentum", "adamw"))
@pytest.mark.parametrize("optimizer", (*OPTIMIZERS, "adamw"))
def test_tables_along_the_ring_equal_those_of_one_process(comm, optimizer):
    for ranks in {1, min(3, comm.size), comm.size}:
        part = part_of(comm, ranks)
        if part is None:
            continue
        for task, clip in (("recommender", None), ("padded", 0.1)):
            how = {"clip_norm": clip, "steps": 6}
            losses, weights, _ = run(TASKS[task], part, num_microbatches=2, **how, **settings(optimizer, 13))
            assert_equal_to_reference(losses, weights, task, optimizer, 13, **how)
        part.Free()


def check(comm, task, workers, servers, optimizer, times=1, **how):
    """Whether a layout equals one process, and gives the same bits so many times."""
    runs = [train(comm, TASKS[task], workers, servers, **how, **settings(optimizer, 13)) for _ in range(times)]
    if runs[0] is None:
        return
    losses, weights, _ = runs[0]
    if weights is None:
        return  # a server
    same = {name: value for name, value in how.items() if name in ("clip_norm", "table_optimizer", "steps")}
    losses = losses or reference(task, optimizer, 13, **same)[0]  # of a round only rank 0 hears
    assert_equal_to_reference(losses, weights, task, optimizer, 13, **same)
    for other in runs[1:]:
        assert other[0] == runs[0][0]
        assert all(torch.equal(weights[name], other[1][name]) for name in weights)


def is_wide(workers, servers, optimizer, update) -> bool:
    """On up to 4 ranks each layout has one optimizer by its servers and another by its workers that is not."""
    turn = LAYOUTS.index((workers, servers)) + OPTIMIZERS.index(optimizer)
    return workers + servers > 4 or turn % 4 != {"server": 0, "worker": 2}[update]


@pytest.mark.mpi(min_size=2)
@pytest.mark.wide_if(case=is_wide)
@pytest.mark.parametrize("update", ("server", "worker"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers, servers", LAYOUTS)
def test_gathered_rounds_equal_one_process(comm, workers, servers, optimizer, update):
    if workers + servers > comm.size:
        pytest.skip(f"needs {workers + servers} ranks")
    for task in ("masked", "recommender"):
        check(comm, task, workers, servers, optimizer, update=update, steps=10)


@pytest.mark.mpi(min_size=4)
@pytest.mark.wide_if(case=lambda task: task in ("deep", "text", "images"))
@pytest.mark.parametrize("task", ("deep", "unused", "frozen", "padded", "alone", "text", "images"))
def test_other_models_too_and_twice_the_same_bits(comm, task):
    """Parameters that some workers do not use, or nobody; frozen ones; a row of an embedding that is never trained."""
    check(comm, task, 3, 1, "adam", times=2, num_microbatches=2, steps=6)
    check(comm, task, 2, 2, "adam", update="worker", clip_norm=0.1, steps=6)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("servers", (1, 2))
@pytest.mark.parametrize("optimizer", ("sgd", "adagrad"))
def test_the_dense_part_by_the_ring_and_tables_by_servers_equal_one_process(comm, servers, optimizer):
    check(comm, "recommender", comm.size - servers if comm.size < 8 else 5, servers, optimizer, dense_via="ring")


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("task", ("deep", "recommender"))
def test_two_workers_get_the_bits_of_the_ring(comm, task):
    served = train(comm, TASKS[task], 2, 1, steps=20, **settings("adam", 13))
    part = part_of(comm, 2)
    if part is None:
        return
    losses, weights, _ = run(TASKS[task], part, **settings("adam", 13))
    assert comm.rank or served[0] == losses
    assert all(torch.equal(served[1][name], weights[name]) for name in weights)
    part.Free()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("task", ("masked", "recommender"))
def test_an_evaluation_on_the_way_sees_all_pushes_and_changes_nothing(comm, task):
    runs = [train(comm, TASKS[task], 2, 1, steps=7, eval_every=every, **settings("adam", 13)) for every in (None, 3)]
    if runs[0] is None or runs[0][1] is None:
        return
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("how", ({"delay": 2}, {"delay_window": 2}), ids=("delay", "window"))
def test_a_delay_gives_the_same_bits_whoever_is_slow(comm, how):
    """Rows of all steps of a delay are asked for before any of them is pushed."""
    how = {**how, "steps": 10, **settings("sgd", 13)}
    runs = [train(comm, TASKS["recommender"], 3, 1, straggler=slow, **how) for slow in ("0:9", "2:9")]
    if runs[0] is not None and runs[0][1] is not None:
        assert all(torch.equal(weight, runs[1][1][name]) for name, weight in runs[0][1].items())


@pytest.mark.mpi(min_size=4)
@pytest.mark.wide_if(case=lambda aggregate: aggregate == "sum")
@pytest.mark.parametrize("aggregate", ("sum", "median", "trimmed-mean"))
def test_an_aggregate_of_the_users_own_is_one_of_ours_written_again(comm, aggregate, shared_tmp_path):
    """For dense gradients, and for rows over the workers that pushed them."""
    file = shared_tmp_path / "own.py"
    if comm.rank == 0:
        file.write_text(
            "from hpctrain.model.aggregate import AGGREGATES\n"
            f"def own(sums, counts):\n    return AGGREGATES['{aggregate}'](sums, counts)\n"
        )
    how = {"steps": 6, **settings("sgd", 13), "lr": 0.01}
    for task in ("masked", "recommender"):
        runs = [train(comm, TASKS[task], 3, 1, aggregate=name, **how) for name in (aggregate, f"{file}:own")]
        if runs[0] is not None and runs[0][1] is not None:
            for name, weight in runs[0][1].items():
                torch.testing.assert_close(weight, runs[1][1][name], rtol=1e-12, atol=1e-12)


def test_a_table_trained_by_sgd_is_a_plain_embedding():
    """Rows that are not looked up have a gradient of zero there, and SGD leaves them where they are."""
    task, steps = Recommender(), 20
    _, weights, executor = run(task, steps=steps, optimizer="sgd", lr=0.3, global_batch_size=13)
    _, first, _ = run(task, steps=1, optimizer="sgd", lr=1e-30, global_batch_size=13)
    model = torch.nn.Sequential(*(factory() for factory in task.layers())).double()
    names = {f"layers.{name}": parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(first[name])
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.3), task.dataset("train")
    for step in range(steps):
        inputs, targets = map(torch.stack, zip(*(data[row] for row in executor.batches.sampler.rows(step))))
        optimizer.zero_grad()
        loss, items = task.loss(model(inputs), targets)
        (loss / items).backward()
        optimizer.step()
    for name, parameter in names.items():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-12, atol=1e-12)
