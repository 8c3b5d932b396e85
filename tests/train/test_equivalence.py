"""The first law: every layout equals one process with the same global batch.

20 steps in float64: losses to 1e-10 relative, weights to 1e-10 * max(1, max|b|) a tensor, 1e-8 for adagrad. All
layouts run on parts of one launch's world.
"""

from functools import cache

import pytest
import torch

from hpctrain.tasks.load import build_task
from tests.harness.once import once
from tests.train.toys import AsModule, Deep, Masked, Tied, Unused, WithFrozen, run

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad")
TASKS = {
    "masked": Masked(),
    "deep": Deep(),
    "unused": Unused(),
    "frozen": WithFrozen(),
    "tied": Tied(),
    "module": AsModule(),
    "images": build_task("images", {"blocks": "1", "width": "8"}, None),
    "text": build_task("text", {"layers": "1", "width": "16", "heads": "2", "context": "8"}, None),
}
MICROBATCHES = (1, 2, 5, 8)
MORE: dict = {}  # what other modules hold against one process
LEARNING_RATES = {"sgd": 0.5, "momentum": 0.1, "adam": 0.01, "adamw": 0.01, "adagrad": 0.1}


@cache
def reference(task: str, optimizer: str, batch_size: int, **how):
    """One process, one micro-batch."""

    def alone():
        losses, weights, _ = run(task_of(task), **how, **settings(optimizer, batch_size))
        return losses, weights

    return once(f"{task} by {optimizer}, {batch_size} rows, {sorted(how.items())}", alone)


def task_of(name: str):
    return TASKS[name] if name in TASKS else MORE[name]


def settings(optimizer: str, batch_size: int) -> dict:
    return {
        "optimizer": optimizer,
        "global_batch_size": batch_size,
        "lr": LEARNING_RATES[optimizer],
        "weight_decay": 0.01,
    }


def assert_equal_to_reference(losses, weights, task, optimizer, batch_size, **how):
    expected_losses, expected = reference(task, optimizer, batch_size, **how)
    tolerance = 1e-8 if optimizer == "adagrad" else 1e-10
    assert losses == pytest.approx(expected_losses, rel=1e-10, abs=0)
    for name, weight in expected.items():
        error = (weights[name] - weight).abs().max()
        assert error <= tolerance * max(1.0, float(weight.abs().max())), f"{name}: {error}"


def part_of(comm, num_ranks: int):
    """The first `num_ranks` ranks of `comm`; None on the others."""
    part = comm.Split(0 if comm.rank < num_ranks else 1, comm.rank)
    if comm.rank < num_ranks:
        return part
    part.Free()
    return None


def is_wide(replicas, optimizer) -> bool:
    return replicas > 4 or replicas < 4 and OPTIMIZERS.index(optimizer) % 3 != replicas % 3


@pytest.mark.mpi
@pytest.mark.wide_if(case=is_wide)
@pytest.mark.parametrize(
    "replicas, optimizer",
    [(replicas, name) for replicas in (1, 2, 3, 4, 8) for name in OPTIMIZERS]
    + [(5, "momentum"), (5, "adagrad"), (6, "sgd"), (7, "adam"), (7, "adamw")],
)
def test_every_number_of_replicas_equals_one_process(comm, replicas, optimizer):
    if replicas > comm.size:
        pytest.skip(f"needs {replicas} ranks")
    part = part_of(comm, replicas)
    if part is None:
        return
    for task, batch_size, microbatches in (("masked", 24, 1), ("masked", 13, 3), ("text", 7, 1), ("unused", 10, 2)):
        losses, weights, _ = run(TASKS[task], part, num_microbatches=microbatches, **settings(optimizer, batch_size))
        assert_equal_to_reference(losses, weights, task, optimizer, batch_size)
    part.Free()


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda task, microbatches: (list(TASKS).index(task) + MICROBATCHES.index(microbatches)) % 2)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("task", TASKS)
def test_every_number_of_micro_batches_equals_one(comm, task, microbatches):
    """Also more pieces than rows: 8 micro-batches of every replica share 11 rows."""
    losses, weights, _ = run(TASKS[task], comm, num_microbatches=microbatches, **settings("adam", 11))
    assert_equal_to_reference(losses, weights, task, "adam", 11)


@pytest.mark.mpi(min_size=2)
def test_all_replicas_hold_the_same_bits_and_twice_gives_them_again(comm):
    runs = [run(Masked(), comm, precision="float32", **settings("adamw", 13))[1] for _ in range(2)]
    for name, weight in runs[0].items():
        assert torch.equal(weight, runs[1][name]), name
        first = weight.clone()
        comm.Bcast(first.numpy(), 0)
        assert torch.equal(first, weight), name
