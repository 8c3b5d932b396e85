"""Whatever the graph looks like, its gradients are global when backward() returns."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain import DataParallel, Mesh
from tests.train.loops import WIDTH, loss_of, net, rows, share


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


@pytest.mark.mpi(min_size=2)
def test_a_rank_whose_loss_uses_no_parameter_still_takes_part(mesh):
    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, use):
            return self.layer(x) if use else x * torch.ones(1, requires_grad=True, dtype=x.dtype)

    model, plain = DataParallel(net(build=Maybe), mesh), net(build=Maybe)
    for _ in range(2):
        model.zero_grad()
        model(rows(0, 3), mesh.rank == 0).sum().backward()
    plain(rows(0, 3), True).sum().backward()
    assert torch.allclose(model.module.layer.weight.grad, plain.layer.weight.grad / mesh.size, rtol=1e-12)


@dataclass
class Answer:
    scores: torch.Tensor
    hidden: tuple
    label: str = "answer"


class Nested(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.layer, self.shape = nn.Linear(WIDTH, WIDTH), shape

    def forward(self, x):
        y = self.layer(x)
        return {"tuple": (x, y), "dict": {"x": 1, "y": [y]}, "class": Answer(x, (None, y))}[self.shape]


def pick(outputs):
    if isinstance(outputs, dict):
        return outputs["y"][0]
    return outputs[1] if isinstance(outputs, tuple) else outputs.hidden[1]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", ("tuple", "dict", "class"))
def test_a_forward_may_return_nested_outputs(mesh, shape):
    model = DataParallel(net(build=lambda: Nested(shape)), mesh)
    seen = []
    model._begin = lambda begin=model._begin: (seen.append(len(seen)), begin())[1]
    pick(model(share(0, mesh))).pow(2).mean().backward()
    assert len(seen) == 3, "an output and two parameters"
    plain = net(build=lambda: Nested(shape))
    pick(plain(rows(0, 4 * mesh.size))).pow(2).mean().backward()
    assert torch.allclose(model.module.layer.weight.grad, plain.layer.weight.grad, rtol=1e-10)


@pytest.mark.mpi
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed_layers_are_right(mesh, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

        def forward(self, x):
            inner = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=reentrant)
            return checkpoint(lambda x: torch.tanh(self.second(x)), inner, use_reentrant=reentrant)

    model, plain = DataParallel(net(build=Checkpointed), mesh, bucket_bytes=1), net(build=Checkpointed)
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
        loss_of(model, share(step, mesh).requires_grad_()).backward()
        loss_of(plain, rows(step, 4 * mesh.size).requires_grad_()).backward()
        for found, expected in zip(model.parameters(), plain.parameters()):
            assert torch.allclose(found.grad, expected.grad, rtol=1e-10)


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_work_and_leave_no_graph_behind(mesh):
    def build():
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def penalty(model, batch):
        outputs = model(batch.requires_grad_())
        (slope,) = torch.autograd.grad(outputs.sum(), batch, create_graph=True)
        return outputs.mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    model, plain = DataParallel(net(build=build), mesh), net(build=build)
    penalty(model, share(0, mesh)).backward()
    penalty(plain, rows(0, 4 * mesh.size)).backward()
    for found, expected in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(found.grad, expected.grad, rtol=1e-10)
    model.zero_grad()
    model(share(0, mesh)).mean().backward(create_graph=True)
    assert not any(parameter.grad.requires_grad for parameter in model.parameters())


@pytest.mark.mpi
def test_two_models_may_share_a_backward(mesh):
    models = [DataParallel(net(seed), mesh, bucket_bytes=1) for seed in (1, 2)]
    plain = [net(1), net(2)]
    batch = torch.ones(3, WIDTH, dtype=torch.float64) * (1 + mesh.rank)
    for each in range(2):
        loss_of(nn.Sequential(*models), batch).backward()
        if each == 0:
            for model in models:
                model.zero_grad()
    batches = [torch.ones(3, WIDTH, dtype=torch.float64) * (1 + rank) for rank in range(mesh.size)]
    (sum(loss_of(nn.Sequential(*plain), each) for each in batches) / mesh.size).backward()
    for model, expected in zip(models, plain):
        assert torch.allclose(model.module.first.weight.grad, expected.first.weight.grad, rtol=1e-9)
