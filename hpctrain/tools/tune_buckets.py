"""Seconds of a training step with buckets of several sizes, in turns.

Each size has a mesh, a model and an optimizer of its own, as a run with it would have, and all train on the same rows.
So all of that is in memory once for each size; sizes end where shared memory has no room for the next.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.plan.tuning import Tuning
from hpctrain.tasks.load import build_task
from hpctrain.tools.tune_sums import slowest
from hpctrain.train.layout import grid_of

CANDIDATES = tuple(256 << 10 << 2 * power for power in range(5))  # bytes: to 64 MiB
STEPS = 3  # of each size in a round


def measured_steps(config: Config, comm, tuning: Tuning, rounds: int) -> dict[int, float]:
    """Median seconds of a step by size of buckets, the slowest rank's. Collective.

    Sizes end with the first that holds all gradients: larger ones would cut them no otherwise; or before the first
    without room in shared memory, where those before had it: messages would be measured that no run with it sends.
    AgreedError for a model or data that do not fit.
    """
    from hpctrain.train.process import settle

    settle(config.threads)
    task = build_task(config.task, config.task_option, config.data)
    with ExitStack() as kept:
        mesh, trained = _executors(kept, config, task, comm, tuning)
        for executor in trained.values():
            executor.run_steps(0, 1)
        own: dict[int, list[float]] = {size: [] for size in trained}
        for number in range(rounds):
            for size in list(trained) if number % 2 == 0 else reversed(trained):
                mesh.barrier()
                began = time.perf_counter()
                trained[size].run_steps(1 + number * STEPS, STEPS)
                own[size].append((time.perf_counter() - began) / STEPS)
        return slowest(mesh, own)


def _executors(kept: ExitStack, config: Config, task, comm, tuning: Tuning) -> tuple[Mesh, dict]:
    """What trains, by size of buckets, and a mesh of all ranks. Collective."""
    from hpctrain.train.errors import AgreedError

    trained: dict = {}
    for size in CANDIDATES:
        try:
            made, executor = kept.enter_context(_trained(replace(config, bucket_bytes=size), task, comm, tuning))
        except AgreedError:  # --allreduce windows, without room for them
            if not trained:
                raise
            _tell_no_room(comm.rank, size)
            break
        nbytes = sum(bucket.flat.nbytes for bucket in executor.gradients.buckets)
        totals, shared = zip(*made.world.all_gather_json([nbytes, _is_shared(made, executor)]))
        if not trained:
            mesh, shared_at_first = made, shared
        elif shared != shared_at_first:
            _tell_no_room(comm.rank, size)
            break
        trained[size] = executor
        if max(totals) <= size:
            break
    return mesh, trained


def _is_shared(mesh: Mesh, executor) -> list[bool]:
    """Whether the replicas sum up in shared memory, and whether all gradients lie there."""
    if (node := mesh.data.ring.node) is None:
        return [False, False]
    places = [(bucket.flat.data_ptr(), bucket.flat.nbytes) for bucket in executor.gradients.buckets]
    return [True, all(any(window.offset_of(*each) is not None for window in node.windows) for each in places)]


def _tell_no_room(rank: int, size: int) -> None:
    if rank == 0:
        print(
            f"note: shared memory has no room for one more model's gradients, so buckets of {size} bytes and more are"
            " not measured",
            file=sys.stderr,
        )


@contextmanager
def _trained(config: Config, task, comm, tuning: Tuning) -> Iterator[tuple]:
    """A mesh and what trains on it; given back at the end, by all ranks in one order. Collective."""
    from hpctrain.train.build import build_executor

    with Mesh(comm, grid_of(config, comm.size), tuning=tuning) as mesh:
        executor = build_executor(config, task, mesh)
        yield mesh, executor
        executor.batches.close()
        executor.gradients.close()
