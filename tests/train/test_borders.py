"""Whatever lies on the border between two stages, training equals one process."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.comm.abort import RankFailed
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.plan.grid import Grid
from hpctrain.plan.program import program
from hpctrain.plan.schedule import Op
from hpctrain.train.build import build_evaluation, build_executor
from hpctrain.train.errors import AgreedError
from tests.train import borders
from tests.train.test_equivalence import MORE, TASKS, assert_equal_to_reference, part_of, settings, task_of
from tests.train.toys import AsModule, Deep, Masked, run

WHOLE = ("InPlace", "WithoutParameters", "FrozenFirst", "FrozenMiddle", "TiedTwice", "TiedFrozen", "SharedObject")
SEES_ITS_MICROBATCH = ("Structures", "Lengths", "Mixed", "Buffered")  # equal to one process with the same micro-batches
HOW = {  # stages and replicas: schedules, and whether forwards are computed again
    (2, 1): [("1f1b", False), ("zb-h1", False), ("1f1b", True)],
    (3, 1): [("zb-h1", False)],
    (4, 1): [("1f1b", False)],
    (2, 2): [("1f1b", True)],
}
MORE |= {name: getattr(borders, name)() for name in (*WHOLE, *SEES_ITS_MICROBATCH)}
ALL_NAMES = (*WHOLE, "unused", "tied", "frozen", "text", "images", *SEES_ITS_MICROBATCH)
FITTING = [
    (name, *layout)
    for name in ALL_NAMES[: -len(SEES_ITS_MICROBATCH)]
    for layout in HOW
    if layout[0] <= len(task_of(name).layers())
]
OWN_MICROBATCH = [
    (name, *layout)
    for name in SEES_ITS_MICROBATCH
    for layout in HOW
    if layout[1] == 1 or name != "Buffered"  # its buffer is each replica's own
]


def on_part(comm, stages, replicas):
    """A communicator of that many ranks, None on the others; a skip where they are too few."""
    if stages * replicas > comm.size:
        pytest.skip(f"needs {stages * replicas} ranks")
    return part_of(comm, stages * replicas)


def is_wide(name, stages, replicas) -> bool:
    """Of two layouts that follow each other a model has one or the other."""
    return (ALL_NAMES.index(name) + list(HOW).index((stages, replicas))) % 2 == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.wide_if(case=is_wide)
@pytest.mark.parametrize("name, stages, replicas", FITTING)
def test_any_model_equals_one_process(comm, name, stages, replicas):
    part = on_part(comm, stages, replicas)
    if part is None:
        return
    for schedule, recompute in HOW[stages, replicas]:
        if recompute and name == "InPlace":
            continue
        how = {"steps": 5, "clip_norm": 0.1}
        losses, weights, _ = run(
            task_of(name),
            part,
            stages=stages,
            schedule=schedule,
            recompute=recompute,
            num_microbatches=4,
            **how,
            **settings("adamw", 13),
        )
        assert_equal_to_reference(losses, weights, name, "adamw", 13, **how)
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.wide_if(case=is_wide)
@pytest.mark.parametrize("name, stages, replicas", OWN_MICROBATCH)
def test_a_model_that_sees_its_micro_batch_equals_one_process_with_as_many(comm, name, stages, replicas):
    part = on_part(comm, stages, replicas)
    if part is None:
        return
    for recompute in (False, True):
        how = {"steps": 5, "stages": stages, "recompute": recompute}
        losses, weights, _ = run(task_of(name), part, num_microbatches=3, **how, **settings("adam", 13))
        assert_equal_to_reference(losses, weights, name, "adam", 13, steps=5, num_microbatches=3 * replicas)
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("recompute", (False, True))
def test_dropout_draws_what_it_draws_in_one_process(comm, recompute):
    """With as many micro-batches in all; also where the forward is computed again."""
    MORE["dropout"] = Masked(dropout=0.5)
    part = on_part(comm, 2, 1)
    if part is None:
        return
    how = {"stages": 2, "recompute": recompute, "num_microbatches": 4}
    losses, weights, _ = run(MORE["dropout"], part, **how, **settings("adam", 13))
    assert_equal_to_reference(losses, weights, "dropout", "adam", 13, num_microbatches=4)
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_numpy_and_python_draw_the_same_numbers_when_a_forward_is_computed_again(comm):
    """And draw on afterwards as if that had not happened."""
    part = on_part(comm, 2, 1)
    if part is None:
        return
    runs, drawn = [], []
    for recompute in (False, True):
        runs.append(run(borders.Noisy(), part, stages=2, num_microbatches=4, steps=4, recompute=recompute))
        drawn.append((random.random(), np.random.rand()))
    assert runs[0][0] == runs[1][0] and drawn[0] == drawn[1]
    assert all(torch.equal(weight, runs[1][1][name]) for name, weight in runs[0][1].items())
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_a_buffer_that_is_replaced_is_counted_once_when_a_forward_is_computed_again(comm):
    if (part := on_part(comm, 2, 1)) is None:
        return
    _, _, executor = run(borders.Counted(), part, stages=2, num_microbatches=4, steps=2, recompute=True)
    assert [buffer.item() for buffer in executor.stage.named_buffers().values()] == [8.0]
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_an_evaluation_of_many_lengths_does_not_run_ahead_of_the_last_stage(comm):
    """More descriptions than there are tags for, and no more messages on their way than stages."""
    if (part := on_part(comm, 2, 1)) is None:
        return

    class Many(borders.Lengths):
        def dataset(self, split):
            return 5 * super().dataset(split)

    with Mesh(part, Grid(2, 1)) as mesh:
        config = Config(stages=2, precision="float64", global_batch_size=1)
        executor = build_executor(config, Many(), mesh)
        links, most = executor.passes.links, []
        put = links.put
        links.put = lambda *message: (put(*message), most.append(links.num_waiting(Op.SEND_F, 0)))
        found = build_evaluation(config, Many(), mesh).run(executor.stage, links)
    assert found["rows"] == 1 and len(most) in (0, 185) and max(most, default=0) <= 3
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("precision", ("float32", "bf16-mixed"))
def test_schedules_give_the_same_bits_and_so_does_the_same_command_twice(comm, precision):
    part = on_part(comm, 2, 1)
    if part is None:
        return
    runs = [
        run(
            TASKS["text"],
            part,
            stages=2,
            schedule=schedule,
            num_microbatches=3,
            steps=3,
            precision=precision,
            optimizer="adamw",
            global_batch_size=7,
        )
        for schedule in ("naive", "f-then-b", "1f1b", "zb-h1", "1f1b")
    ]
    for losses, weights, _ in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(weight, runs[0][1][name]) for name, weight in weights.items())
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", ("naive", "f-then-b", "1f1b", "1f1b-interleaved", "zb-h1"))
def test_what_is_done_is_what_the_schedule_says(comm, schedule):
    part = on_part(comm, 2, 1)
    if part is None:
        return
    log = []
    _, _, executor = run(Deep(), part, log, stages=2, schedule=schedule, num_microbatches=4, steps=2)
    assert log == 2 * program(schedule, executor.place)
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_only_the_border_travels(comm):
    """Bytes on each link: activations of the rows, and gradients of the same size back; nothing for empty pieces."""
    stages = min(4, comm.size)
    part = on_part(comm, stages, 1)
    if part is None:
        return
    _, _, executor = run(Deep(), part, stages=stages, steps=1, num_microbatches=16, global_batch_size=13)
    border = 13 * 3 * 8 * 8  # rows, items, width, bytes
    links = (executor.place.stage > 0) + (executor.place.stage < stages - 1)
    sent, messages, _ = executor.passes.links.figures
    assert (sent, messages) == (links * border, links * 13)
    part.Free()


@pytest.mark.mpi(min_size=4)
def test_1f1b_keeps_the_activations_of_as_many_micro_batches_as_there_are_stages(comm):
    part = on_part(comm, 4, 1)
    if part is None:
        return
    peaks = {}
    for schedule, recompute in (("f-then-b", False), ("1f1b", False), ("1f1b", True)):
        how = {"stages": 4, "num_microbatches": 32, "global_batch_size": 32, "steps": 2, "recompute": recompute}
        _, _, executor = run(Deep(), part, schedule=schedule, **how)
        peaks[schedule, recompute] = executor.passes.meter.peak
        assert executor.passes.peak_in_flight == (32 if schedule == "f-then-b" else 4 - executor.place.stage)
    if executor.place.stage == 0:
        assert peaks["1f1b", False] / peaks["f-then-b", False] == pytest.approx(4 / 32, rel=0.1)
        assert peaks["1f1b", True] < 0.6 * peaks["1f1b", False]
    part.Free()


REFUSED = [
    (AsModule(), {}, "--stages 2: the task has a module(); only a list of layers() can be cut"),
    (Masked(), {"stages": 4}, "--stages 4: the model has 3 layers, enough for 3 stages; on 4 ranks"),
    (
        borders.TiedTwice(),
        {"schedule": "1f1b-async"},
        "--schedule 1f1b-async: layers.0.weight and layers.2.weight are one parameter on two stages; take a schedule"
        " with a flush, such as 1f1b",
    ),
    (
        borders.HalfFrozen(),
        {},
        "--task: ties() names layers.0.weight and layers.2.weight and layers.4.weight, of which one is frozen;",
    ),
    (Masked(), {"stage_split": "2,2"}, "--stage-split 2,2: 2 stages with 4 layers; there are 2 stages and 3 layers"),
    (Masked(), {"stage_split": "by-ear"}, "--stage-split by-ear: No such file or directory; expected flops or"),
]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("task, how, line", REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_cannot_be_cut_is_refused_on_all_ranks(comm, task, how, line):
    part = on_part(comm, 4, 1)
    if part is None:
        return
    with pytest.raises(AgreedError) as caught:
        run(task, part, **{"stages": 2, "steps": 1, **how})
    assert str(caught.value).startswith(line)


@pytest.mark.mpi(min_size=2)
def test_writing_to_the_inputs_of_a_stage_that_are_needed_again_is_told(comm):
    part = on_part(comm, 2, 1)
    if part is None:
        return

    class Writing(Masked):
        def layers(self):
            return [lambda: nn.ReLU(inplace=True), *super().layers()]

    if comm.rank == 0:
        with pytest.raises(RankFailed, match="layers.0 writes to its inputs in place; --recompute needs them again"):
            run(Writing(), None, recompute=True, steps=1)
    part.Free()
