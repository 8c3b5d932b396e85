"""The first law for pipelines: every schedule on every grid of stages and replicas equals one process."""

import itertools

import pytest

from hpctrain.plan.schedule import SCHEDULES
from tests.train.test_equivalence import assert_equal_to_reference, part_of, settings
from tests.train.toys import Deep, run

SYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if schedule.flushes]
GRIDS = [(stages, replicas) for stages in (1, 2, 3, 4, 8) for replicas in (1, 2) if stages * replicas <= 8]


def fits(schedule, stages, microbatches) -> bool:
    return not SCHEDULES[schedule].has_chunks or (stages > 1 and microbatches % stages == 0)


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("stages, replicas", GRIDS)
def test_every_grid_and_schedule_equals_one_process(comm, stages, replicas, schedule):
    if stages * replicas > comm.size:
        pytest.skip(f"needs {stages * replicas} ranks")
    part = part_of(comm, stages * replicas)
    if part is None:
        return
    for microbatches, (optimizer, clip) in itertools.product((1, 3, 8), (("sgd", None), ("adam", 0.05))):
        pieces = -(-microbatches // stages) * stages if SCHEDULES[schedule].has_chunks else microbatches
        if fits(schedule, stages, pieces):
            how = {"steps": 3, "clip_norm": clip}
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
