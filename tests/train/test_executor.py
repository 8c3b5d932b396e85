"""What a step does with odd ranks: unused parameters, NaN on one of them, nothing to count, fewer rows than ranks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.plan.program import program
from hpctrain.train.build import build_executor
from hpctrain.train.errors import AgreedError, NotFinite
from tests.train.toys import Masked, Unused, WithFrozen, run


class Poisoned(nn.Module):
    """Multiplies by a trained 1; rows whose first value is `mark` give NaN in the gradient, or in the loss."""

    def __init__(self, mark, where):
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.mark, self.where = mark, where

    def forward(self, x):
        bad = (x[:, 0, 0] == self.mark).any()
        if bad and self.where == "loss":
            return x * self.one * float("nan")
        one = self.one * 1
        if bad:
            one.register_hook(lambda gradient: gradient * float("nan"))
        return x * one


@dataclass
class WithPoison(Masked):
    """Row `row` is poison."""

    row: int = 0
    where: str = "gradient"

    def layers(self):
        mark = float(self.dataset("train")[self.row][0][0, 0])
        return [lambda: Poisoned(mark, self.where)] + super().layers()


def executor_of(task, comm, mesh=None, **settings):
    config = Config(**{"precision": "float64", "bucket_bytes": 100, "optimizer": "adam", "lr": 0.01, **settings})
    mesh = mesh or Mesh(comm)
    executor = build_executor(config, task, mesh)
    return executor, program("1f1b", executor.place), mesh


def poisoned_step(executor, row):
    """The step (from 0) whose batch holds the row, and the replica that computes it when micro-batches are 1."""
    sampler = executor.batches.sampler
    step = next(step for step in range(100) if row in sampler.rows(step))
    return step, int(np.flatnonzero(sampler.rows(step) == row)[0])


@pytest.mark.mpi
@pytest.mark.parametrize("where", ("gradient", "loss"))
def test_nan_on_one_rank_stops_all_with_step_rank_and_name(comm, where):
    executor, actions, mesh = executor_of(WithPoison(where=where, row=3), comm, global_batch_size=comm.size)
    step, culprit = poisoned_step(executor, 3)
    for number in range(step):
        executor.run(actions, number)
    before = [p.clone() for p in executor.stage.named_parameters().values()]
    with pytest.raises(NotFinite) as caught:
        executor.run(actions, step)
    what = "the loss" if where == "loss" else "the gradient of layers.0.one"
    assert str(caught.value) == f"step {step + 1}: not finite: {what} on rank {culprit}"
    assert all(torch.equal(a, b) for a, b in zip(before, executor.stage.named_parameters().values()))
    mesh.close()


@pytest.mark.mpi
def test_skipping_leaves_weights_and_optimizer_as_they_were_on_every_rank(comm):
    task = WithPoison(row=3)
    executor, actions, mesh = executor_of(task, comm, global_batch_size=comm.size, on_nan="skip")
    twin, twin_actions, twin_mesh = executor_of(task, comm, global_batch_size=comm.size, on_nan="skip")
    step, _ = poisoned_step(executor, 3)
    for number in range(step + 3):
        result = executor.run(actions, number)
        assert (result.skipped is not None) == (number == step)
        assert result.skipped is None or result.loss is None
        if number != step:
            twin.run(twin_actions, number)
    for name, parameter in executor.stage.named_parameters().items():
        assert torch.equal(parameter, twin.stage.named_parameters()[name]), name
    mesh.close()
    twin_mesh.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shard_optimizer", (False, True))
def test_a_sum_that_overflows_is_found_though_every_share_is_finite(comm, shard_optimizer):
    """With a shared optimizer by the owner of the sum, who alone has it."""
    how = {"global_batch_size": comm.size, "precision": "float32", "shard_optimizer": shard_optimizer}
    executor, actions, mesh = executor_of(Masked(), comm, **how)
    large = torch.full_like(executor.gradients.views["layers.2.bias"], 3e38)
    executor.stage.named_parameters()["layers.2.bias"].register_hook(lambda gradient: large)
    rows = [row for row in range(100) if len(executor.batches.sampler.rows(row)) == comm.size]
    with pytest.raises(NotFinite, match="the sum of the gradients of layers.2.bias over all ranks is not finite"):
        for step in rows[:20]:
            executor.run(actions, step)
    mesh.close()


@pytest.mark.mpi
def test_a_parameter_nobody_uses_keeps_its_value_and_has_no_optimizer_state(comm):
    _, weights, executor = run(Unused(), comm, optimizer="adamw", weight_decay=0.1, global_batch_size=6)
    fresh, _, mesh = executor_of(Unused(), None)
    parameters = executor.stage.named_parameters()
    for name in ("layers.0.never.weight", "layers.0.never.bias"):
        assert torch.equal(weights[name], fresh.stage.named_parameters()[name])
        assert parameters[name] not in executor.optimizer.state
    counts = [
        executor.optimizer.state[parameters[f"layers.0.{name}.weight"]]["step"] for name in ("sometimes", "always")
    ]
    assert 0 < int(counts[0]) < int(counts[1]) <= 20


@pytest.mark.mpi
def test_a_step_without_a_single_item_changes_nothing(comm):
    task = Masked()
    data = [(inputs, torch.full_like(targets, -1)) for inputs, targets in task.dataset("train")]
    task.dataset = lambda split: data
    executor, actions, mesh = executor_of(task, comm, global_batch_size=5, weight_decay=0.1)
    before = [p.clone() for p in executor.stage.named_parameters().values()]
    result = executor.run(actions, 0)
    assert (result.loss, result.items, result.skipped) == (None, 0, None)
    assert all(torch.equal(a, b) for a, b in zip(before, executor.stage.named_parameters().values()))
    mesh.close()


@pytest.mark.mpi
def test_accumulation_moves_the_gradients_once_an_update(comm):
    sent = {}
    for microbatches in (1, 4):
        how = {"num_microbatches": microbatches, "global_batch_size": 32, "allreduce": "ring"}
        executor, actions, mesh = executor_of(Masked(), comm, **how)
        executor.run(actions, 0)
        counters = mesh.data.ring.counters
        sent[microbatches] = (counters.bytes_sent, counters.messages_sent, counters.control_messages)
        mesh.close()
    assert sent[1] == sent[4]
    assert (sent[1][0] > 0) == (comm.size > 1)


@pytest.mark.mpi
def test_the_first_bucket_travels_before_the_backward_is_over(comm):
    executor, actions, mesh = executor_of(Masked(), comm, global_batch_size=37)
    started = []
    for number, reduction in enumerate(executor.update.reduction.collectives):
        start = reduction.start

        def note(number=number, start=start):
            started.append((number, sum(executor.gradients.touched.values())))
            start()

        reduction.start = note
    executor.run(actions, 0)
    assert [number for number, _ in started] == list(range(len(executor.update.reduction.collectives)))
    assert started[0][1] < len(executor.gradients.parameters)
    mesh.close()


@pytest.mark.mpi(min_size=2)
def test_layers_that_differ_by_rank_start_equal_frozen_and_buffers_too(comm):
    class Random(WithFrozen):
        def layers(self):
            def anywhere(factory):
                def build():
                    torch.manual_seed(comm.rank + 1)
                    return factory()

                return build

            return [anywhere(factory) for factory in super().layers()]

    executor, _, mesh = executor_of(Random(), comm)
    for name, tensor in {**executor.stage.named_parameters(), **executor.stage.named_buffers()}.items():
        first = tensor.detach().clone()
        comm.Bcast(first.numpy(), 0)
        assert torch.equal(first, tensor), name
    torch.manual_seed(1)
    assert torch.equal(executor.stage.layers[0].shift, WithFrozen().layers()[0]().double().shift), "rank 0's stands"
    mesh.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_built_different_models_are_told_so(comm):
    class Different(Masked):
        def layers(self):
            return super().layers() + ([] if comm.rank != 1 else [lambda: nn.Linear(4, 4)])

    mesh = Mesh(comm)
    with pytest.raises(
        AgreedError, match=r"replica 1 built a different model: 'nothing more' on replica 0, 'layers.3.weight"
    ):
        executor_of(Different(), comm, mesh)
    mesh.close()


@pytest.mark.mpi
def test_dropout_is_the_same_wherever_a_micro_batch_is_computed(comm):
    """n replicas x 1 and 1 replica x n micro-batches draw the same masks."""
    task = Masked(dropout=0.5)
    losses, weights, _ = run(task, comm, optimizer="sgd", lr=0.3, global_batch_size=16)
    expected, reference, _ = run(task, None, optimizer="sgd", lr=0.3, global_batch_size=16, num_microbatches=comm.size)
    assert losses == pytest.approx(expected, rel=1e-10)
    for name, weight in reference.items():
        assert (weights[name] - weight).abs().max() <= 1e-10, name
    assert expected != run(Masked(), None, optimizer="sgd", lr=0.3, global_batch_size=16)[0], "there is dropout at all"


@pytest.mark.mpi(min_size=2)
def test_fewer_rows_than_ranks_leave_some_with_nothing_to_do(comm):
    losses, weights, _ = run(Masked(), comm, optimizer="momentum", global_batch_size=1)
    expected, reference, _ = run(Masked(), None, optimizer="momentum", global_batch_size=1)
    assert [loss is None for loss in losses] == [loss is None for loss in expected], "a row may have nothing to count"
    assert [x for x in losses if x is not None] == pytest.approx([x for x in expected if x is not None], rel=1e-10)
    for name, weight in reference.items():
        assert (weights[name] - weight).abs().max() <= 1e-10 * max(1, weight.abs().max()), name
