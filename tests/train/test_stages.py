"""What a pipeline does with odd steps: NaN on one stage, nothing to count, evaluation of any number of rows."""

import pytest
import torch

from hpctrain.comm.abort import RankFailed
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config, UsageError
from hpctrain.plan.grid import Grid
from hpctrain.plan.program import program
from hpctrain.train.build import build_evaluation, build_executor
from hpctrain.train.errors import NotFinite
from hpctrain.train.layout import settled
from tests.harness.once import once
from tests.train.test_borders import on_part
from tests.train.test_equivalence import part_of
from tests.train.test_executor import WithPoison, poisoned_step
from tests.train.toys import Deep, Masked


def executor_of(task, part, stages, replicas=1, **settings):
    config = Config(stages=stages, **{"precision": "float64", "optimizer": "adam", "lr": 0.01, **settings})
    mesh = Mesh(part, Grid(stages, replicas))
    executor = build_executor(config, task, mesh)
    return executor, program(executor.name, executor.place), mesh


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where, first", (("gradient", True), ("loss", False), ("gradient", False)))
def test_nan_on_one_stage_stops_all_with_step_rank_and_name(comm, where, first):
    part = on_part(comm, 2, 1)
    if part is None:
        return

    class AtTheEnd(WithPoison):
        def layers(self):
            poison, *rest = super().layers()
            return [poison, *rest] if first else [lambda: torch.nn.Identity(), poison, *rest]

    task = AtTheEnd(where=where, row=3)
    counts = "1,3" if first else "1,4"
    executor, actions, mesh = executor_of(task, part, 2, global_batch_size=8, num_microbatches=8, stage_split=counts)
    step, _ = poisoned_step(executor, 3)
    for number in range(step):
        executor.run(actions, number)
    before = [p.clone() for p in executor.stage.named_parameters().values()]
    with pytest.raises(NotFinite) as caught:
        executor.run(actions, step)
    what = "the loss on rank 1" if where == "loss" else f"the gradient of layers.{1 - first}.one on rank {1 - first}"
    assert str(caught.value) == f"step {step + 1}: not finite: {what}"
    assert all(torch.equal(a, b) for a, b in zip(before, executor.stage.named_parameters().values()))
    mesh.close()
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_skipping_leaves_all_stages_as_they_were(comm):
    part = on_part(comm, 2, 1)
    if part is None:
        return
    how = {"global_batch_size": 8, "num_microbatches": 4, "on_nan": "skip"}
    executor, actions, mesh = executor_of(WithPoison(row=3), part, 2, **how)
    step, _ = poisoned_step(executor, 3)
    for number in range(step + 3):
        before = [p.clone() for p in executor.stage.named_parameters().values()]
        result = executor.run(actions, number)
        assert (result.skipped is not None) == (number == step)
        same = all(torch.equal(a, b) for a, b in zip(before, executor.stage.named_parameters().values()))
        assert same == (number == step)
    mesh.close()
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_without_a_flush_nan_ends_the_job_where_it_is_seen(comm):
    if comm.rank:
        return
    executor, _, mesh = executor_of(
        WithPoison(where="loss", row=3), None, 1, schedule="1f1b-async", global_batch_size=8
    )
    step, _ = poisoned_step(executor, 3)
    actions = program("1f1b-async", executor.place._replace(num_updates=step + 1))
    with pytest.raises(RankFailed, match=f"step {step + 1}: not finite: the loss on rank 0"):
        executor.run(actions, 0)
    mesh.close()


@pytest.mark.mpi(min_size=2)
def test_a_step_without_a_single_item_changes_nothing_on_any_stage(comm):
    part = on_part(comm, 2, 1)
    if part is None:
        return
    task = Masked()
    data = [(inputs, torch.full_like(targets, -1)) for inputs, targets in task.dataset("train")]
    task.dataset = lambda split: data
    executor, actions, mesh = executor_of(task, part, 2, global_batch_size=5, weight_decay=0.1)
    before = [p.clone() for p in executor.stage.named_parameters().values()]
    result = executor.run(actions, 0)
    assert (result.loss, result.items, result.skipped) == (None, 0, None)
    assert all(torch.equal(a, b) for a, b in zip(before, executor.stage.named_parameters().values()))
    mesh.close()
    part.Free()


def evaluated(batch_size: int) -> Config:
    return Config(precision="float64", global_batch_size=batch_size)


def alone(batch_size: int) -> float:
    """The loss of one process."""

    def compute():
        executor, _, mesh = executor_of(Deep(), None, 1)
        return build_evaluation(evaluated(batch_size), Deep(), mesh).run(executor.stage)["loss"]

    return once(f"an evaluation of deep by batches of {batch_size}", compute)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stages, replicas, chunks", [(2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 2), (3, 1, 1)])
def test_an_evaluation_counts_every_row_once_and_all_ranks_know_it(comm, stages, replicas, chunks):
    part = on_part(comm, stages, replicas)
    if part is None:
        return
    schedule = "1f1b-interleaved" if chunks > 1 else "1f1b"
    for batch_size in (1, 5, 37, 100):
        how = {"global_batch_size": batch_size, "num_microbatches": 4, "chunks": chunks, "schedule": schedule}
        executor, _, mesh = executor_of(Deep(), part, stages, replicas, **how)
        config = evaluated(batch_size)
        found = build_evaluation(config, Deep(), mesh).run(executor.stage, executor.passes.links)
        assert found["loss"] == pytest.approx(alone(batch_size), rel=1e-12)
        mesh.close()
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_gradients_travel_between_the_replicas_while_the_last_backward_still_runs(comm):
    """In a hybrid as without stages: the last bucket of the last layers starts before the first layers are done."""
    if (part := part_of(comm, comm.size - comm.size % 2)) is None:
        return
    stages = 2 if part.size >= 4 else 1
    executor, actions, mesh = executor_of(
        Deep(), part, stages, part.size // stages, bucket_bytes=100, global_batch_size=16, num_microbatches=2
    )
    started = []
    for number, collective in enumerate(executor.update.reduction.collectives):
        start = collective.start
        collective.start = lambda start=start, number=number: (started.append(number), start())[1]
    num_at_reduce = []
    executor.watchers.append(lambda action, *times: num_at_reduce.append((str(action), len(started))))
    executor.run(actions, 0)
    assert dict(num_at_reduce)["F1"] == 0 and started == sorted(started) and len(started) > 3
    assert dict(num_at_reduce)["B1"] == len(started)
    mesh.close()
    part.Free()


@pytest.mark.parametrize(
    "settings, num_ranks, line",
    [
        ({"stages": 3}, 8, "--stages 3: 8 ranks do not divide by it; 1, 2, 4, 8 would do"),
        ({"stages": 9}, 8, "--stages 9: 8 ranks do not divide by it; 1, 2, 4, 8 would do"),
        (
            {"stages": 2, "schedule": "1f1b-interleaved", "num_microbatches": 3},
            2,
            "--num-microbatches 3: --schedule 1f1b-interleaved takes multiples of --stages, such as 2 or 4",
        ),
        ({"stages": 4, "schedule": "2bw", "num_microbatches": 3}, 4, "--num-microbatches 3: --schedule 2bw takes"),
        ({"chunks": 2}, 1, "--chunks 2: --schedule 1f1b has one chunk of layers a stage"),
        ({"servers": 1, "straggler": "3:4"}, 4, "--straggler 3:4: ranks 0 to 2 train; give one of them, or any"),
    ],
)
def test_layouts_that_cannot_be_are_refused_with_those_that_could(settings, num_ranks, line):
    with pytest.raises(UsageError) as caught:
        settled(Config(**settings), num_ranks)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    "settings, num_ranks, pieces",
    [
        ({}, 8, 1),
        ({"stages": 4}, 4, 16),
        ({"stages": 4}, 8, 16),
        ({"stages": 4, "global_batch_size": 10}, 4, 10),
        ({"stages": 4, "global_batch_size": 2}, 4, 2),
        ({"stages": 4, "schedule": "naive"}, 4, 1),
        ({"stages": 4, "schedule": "1f1b-interleaved", "global_batch_size": 10}, 4, 8),
        ({"stages": 4, "schedule": "1f1b-interleaved", "global_batch_size": 3}, 4, 4),
        ({"stages": 4, "schedule": "2bw", "global_batch_size": 3}, 4, 4),
        ({"stages": 2, "micro_batch_size": 3}, 4, 6),
        ({"micro_batch_size": 5}, 1, 7),
        ({"stages": 2, "num_microbatches": 3}, 4, 3),
    ],
)
def test_micro_batches_are_as_many_as_bring_something(settings, num_ranks, pieces):
    config = settled(Config(**settings), num_ranks)
    assert config.num_microbatches == pieces and settled(config, num_ranks) == config
