"""The first law for pipelines: every schedule on every grid of stages and replicas equals one process."""

import pytest

from hpctrain.plan.schedule import SCHEDULES
from tests.train.test_equivalence import TASKS, assert_equal_to_reference, part_of, settings
from tests.train.toys import Deep, run

SYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if schedule.flushes]
CLIPPED = {"sgd": None, "adam": 0.05}  # optimizers, and the norm that gradients are cut to
GRIDS = [(stages, replicas) for stages in (1, 2, 3, 4, 8) for replicas in (1, 2) if stages * replicas <= 8]


def is_wide(stages, replicas, **_) -> bool:
    return stages * replicas > 4


def is_wide_grid(stages, replicas, schedule, optimizer) -> bool:
    """On up to 4 ranks each grid has each schedule, with one optimizer or the other."""
    turn = GRIDS.index((stages, replicas)) + SYNCHRONOUS.index(schedule)
    return is_wide(stages, replicas) or turn % 2 != list(CLIPPED).index(optimizer)


def fits(schedule, stages, microbatches) -> bool:
    return not SCHEDULES[schedule].has_chunks or (stages > 1 and microbatches % stages == 0)


@pytest.mark.mpi
@pytest.mark.wide_if(case=is_wide_grid)
@pytest.mark.parametrize("optimizer", CLIPPED)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("stages, replicas", GRIDS)
def test_every_grid_and_schedule_equals_one_process(comm, stages, replicas, schedule, optimizer):
    if stages * replicas > comm.size:
        pytest.skip(f"needs {stages * replicas} ranks")
    part = part_of(comm, stages * replicas)
    if part is None:
        return
    for microbatches in (1, 3, 8):
        pieces = -(-microbatches // stages) * stages if SCHEDULES[schedule].has_chunks else microbatches
        if fits(schedule, stages, pieces):
            how = {"steps": 3, "clip_norm": CLIPPED[optimizer]}
            losses, weights, _ = run(
                Deep(),
                part,
                stages=stages,
                schedule=schedule,
                num_microbatches=pieces,
                **how,
                **settings(optimizer, 13),
            )
            assert_equal_to_reference(losses, weights, "deep", optimizer, 13, **how)
    part.Free()


COVER = [  # stages, replicas, schedule, micro-batches, optimizer, task, batch size
    (2, 1, "1f1b", 3, "adam", "masked", 13),
    (3, 2, "zb-h1", 2, "momentum", "tied", 24),
    (4, 2, "f-then-b", 8, "adamw", "deep", 13),
    (8, 1, "1f1b", 5, "sgd", "deep", 24),
    (2, 4, "naive", 2, "adagrad", "unused", 24),
    (4, 1, "1f1b-interleaved", 4, "adam", "deep", 13),
    (2, 2, "1f1b-interleaved", 2, "sgd", "deep", 11),
    (3, 1, "f-then-b", 8, "sgd", "frozen", 11),
    (4, 2, "zb-h1", 3, "adam", "deep", 24),
    (2, 3, "1f1b", 2, "adamw", "images", 7),
    (3, 1, "1f1b", 2, "momentum", "text", 7),
]


@pytest.mark.mpi
@pytest.mark.wide_if(case=is_wide)
@pytest.mark.parametrize("stages, replicas, schedule, microbatches, optimizer, task, batch_size", COVER)
def test_twenty_steps_equal_one_process(comm, stages, replicas, schedule, microbatches, optimizer, task, batch_size):
    """Each pair of choices once: layout, schedule, optimizer, task, rows that divide or not."""
    if stages * replicas > comm.size:
        pytest.skip(f"needs {stages * replicas} ranks")
    part = part_of(comm, stages * replicas)
    if part is None:
        return
    how = {"clip_norm": 0.1, "lr_schedule": "cosine"}
    losses, weights, _ = run(
        TASKS[task],
        part,
        stages=stages,
        schedule=schedule,
        num_microbatches=microbatches,
        **how,
        **settings(optimizer, batch_size),
    )
    assert_equal_to_reference(losses, weights, task, optimizer, batch_size, **how)
    part.Free()
