"""Seconds of a training step with buckets of several sizes, in turns.

Each size has a mesh, a model and an optimizer of its own, as a run with it would have, and all train on the same rows.
"""

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

    Sizes end with the first that holds all gradients: larger ones would cut them no otherwise. AgreedError for a model
    or data that do not fit.
    """
    from hpctrain.train.process import settle

    settle(config.threads)
    task = build_task(config.task, config.task_option, config.data)
    with ExitStack() as kept:
        trained = {}
        for size in CANDIDATES:
            mesh, executor = kept.enter_context(_trained(replace(config, bucket_bytes=size), task, comm, tuning))
            trained[size] = executor
            total = sum(bucket.flat.nbytes for bucket in executor.gradients.buckets)
            if max(mesh.world.all_gather_json(total)) <= size:
                break
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


@contextmanager
def _trained(config: Config, task, comm, tuning: Tuning) -> Iterator[tuple]:
    """A mesh and what trains on it; given back at the end, by all ranks in one order. Collective."""
    from hpctrain.train.build import build_executor

    with Mesh(comm, grid_of(config, comm.size), tuning=tuning) as mesh:
        executor = build_executor(config, task, mesh)
        yield mesh, executor
        executor.batches.close()
        executor.gradients.close()
