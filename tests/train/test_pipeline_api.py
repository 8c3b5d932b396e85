"""Pipeline in a loop of one's own: equal to plain torch, with modules or factories, replicas, odd numbers of rows."""

import pytest
import torch
from torch import nn

from hpctrain import Mesh, Pipeline
from tests.train.test_borders import on_part


def layers():
    torch.manual_seed(1)
    parts = nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*parts).double()


def batch(step, num_rows=11):
    torch.manual_seed(100 + step)
    inputs = torch.randn(num_rows, 4, dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def plain(num_steps, clip_norm):
    """Losses, the loss on other rows at the end, and the weights of a loop of plain torch."""
    model = layers()
    optimizer, losses = adam(model.parameters()), []
    for step in range(num_steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    inputs, targets = batch(99, 7)
    with torch.no_grad():
        return losses, nn.functional.mse_loss(model(inputs), targets).item(), model.state_dict()


@pytest.mark.mpi
@pytest.mark.parametrize("stages, replicas", [(1, 1), (2, 1), (3, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1"))
def test_a_loop_with_a_pipeline_equals_plain_torch(comm, stages, replicas, schedule):
    part = on_part(comm, stages, replicas)
    if part is None:
        return
    losses, evaluated, weights = plain(6, 0.5)
    with Mesh(part, stages=stages) as mesh:
        how = {"schedule": schedule, "num_microbatches": 3, "clip_norm": 0.5, "example": batch(0)[0][:2]}
        pipeline = Pipeline(layers(), nn.functional.mse_loss, mesh, adam, **how)

        def own(rows):
            return rows[mesh.replica :: replicas]

        for step, expected in enumerate(losses):
            assert pipeline.step(*map(own, batch(step))) == pytest.approx(expected, rel=1e-10)
        assert pipeline.evaluate(*map(own, batch(99, 7))) == pytest.approx(evaluated, rel=1e-10)
        for name, tensor in pipeline.state_dict().items():
            assert torch.allclose(tensor, weights[name], rtol=1e-10, atol=1e-12), name
        here = mesh.pipe.all_gather_json(list(pipeline.state_dict()))
        assert sorted(name for names in here for name in names) == sorted(weights)
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_several_pipelines_share_a_mesh_and_leave_the_generator_alone(comm):
    part = on_part(comm, 2, 1)
    if part is None:
        return
    with Mesh(part, stages=2) as mesh:
        factories = [lambda: nn.Linear(4, 8), nn.Tanh, lambda: nn.Linear(8, 1)]
        pipelines = []
        for schedule in ("1f1b", "1f1b-async", "2bw", "1f1b-interleaved"):
            if schedule == "1f1b-interleaved":
                factories.append(lambda: nn.Linear(1, 1))
            torch.manual_seed(5)
            pipelines.append(Pipeline(factories, summed, mesh, adam, schedule=schedule, num_microbatches=4))
            drawn = torch.rand(1)
            torch.manual_seed(5)
            assert torch.equal(drawn, torch.rand(1))
        for step in range(3):
            rows = [each.float() for each in batch(step, 3)]  # fewer than micro-batches
            for pipeline in pipelines:
                torch.manual_seed(step)
                assert pipeline.step(*rows) > 0 and pipeline.evaluate(*rows) > 0
                drawn = torch.rand(1)
                torch.manual_seed(step)
                assert torch.equal(drawn, torch.rand(1)), "or stages would draw different rows from then on"
        others = Pipeline(factories, summed, mesh, adam, num_microbatches=4)
        weights = {name: tensor for state in told(mesh, pipelines[3].state_dict()) for name, tensor in state.items()}
        others.load_state_dict(weights)
        assert others.evaluate(*rows) == pytest.approx(pipelines[3].evaluate(*rows), rel=1e-6)
        num_groups = len(mesh.parts)
        pipelines[0].close()
        pipelines[0].close()
        assert len(mesh.parts) == num_groups - 1
    part.Free()


def told(mesh, state):
    """The states of all stages."""
    lists = mesh.pipe.all_gather_json({name: tensor.tolist() for name, tensor in state.items()})
    return [{name: torch.tensor(values) for name, values in each.items()} for each in lists]


def summed(outputs, targets):
    return ((outputs - targets) ** 2).sum(), targets.numel()


@pytest.mark.mpi(min_size=2)
def test_several_steps_in_one_go_are_the_same_with_a_flush_and_late_without(comm):
    part = on_part(comm, 2, 1)
    if part is None:
        return
    batches = [batch(step) for step in range(4)]
    with Mesh(part, stages=2) as mesh:
        one, other, late, drained = (
            Pipeline(layers(), summed, mesh, adam, schedule=schedule, num_microbatches=4)
            for schedule in ("1f1b", "1f1b", "1f1b-async", "1f1b-async")
        )
        losses = one.run(batches)
        assert losses == [other.step(*each) for each in batches] and len(losses) == 4
        assert late.run(batches) != [drained.step(*each) for each in batches]
        assert len(late.executor.update.versions) == 16 and late.executor.update.versions[15] == (14 + mesh.stage, 15)
        assert drained.executor.update.versions[15] == (2 + mesh.stage, 3)
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_what_does_not_fit_is_told(comm):
    part = on_part(comm, 2, 1)
    if part is None:
        return
    with pytest.raises(ValueError, match="stages=3: 2 ranks do not divide by it; 1, 2 would do"):
        Mesh(part, stages=3)
    with Mesh(part, stages=2) as mesh:
        with pytest.raises(TypeError, match="Pipeline: no setting is called lr; there is chunks, pipeline_warmup"):
            Pipeline(layers(), summed, mesh, adam, lr=0.1)
        with pytest.raises(ValueError, match="--num-microbatches: expected a whole number >= 1, got 0"):
            Pipeline(layers(), summed, mesh, adam, num_microbatches=0)
        with pytest.raises(ValueError, match="--schedule: expected one of naive, f-then-b"):
            Pipeline(layers(), summed, mesh, adam, schedule="2f2b")
        with pytest.raises(RuntimeError, match="--stages 2: the model has 1 layer, enough for 1 stage"):
            Pipeline([nn.Linear(4, 1)], summed, mesh, adam)
        pipeline = Pipeline(layers(), summed, mesh, adam)
        inputs, targets = batch(0)
        with pytest.raises(ValueError, match="Pipeline: 11 rows of inputs, 10 of targets; give as many"):
            pipeline.step(inputs, targets[1:])
    part.Free()
