"""Whatever the graph looks like, its gradients are global when backward() returns."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain import DataParallel, Mesh
from hpctrain.comm.signature import CollectiveMismatch
from tests.train.loops import WIDTH, loss_of, mean_loss, net, rows, share


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


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, skip=False):
        x = torch.tanh(self.first(x))
        return self.last(x if skip else torch.tanh(self.second(x)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("skipping", (0, 1))
@pytest.mark.parametrize("bucket_bytes", (1, 1 << 20))
def test_models_of_one_shape_whose_ends_come_in_another_order_on_each_rank_do_not_mix(mesh, skipping, bucket_bytes):
    """Rank 1 leaves out a layer of one of the two models, so that its buckets wait for the end of the backward."""

    def loss(models, rank):
        outputs = [model(rows(rank, 4), rank == 1 and each == skipping) for each, model in enumerate(models)]
        return outputs[0].square().mean() + 2 * outputs[1].square().mean()

    models = [DataParallel(net(seed, build=Skipping), mesh, bucket_bytes=bucket_bytes) for seed in (1, 2)]
    plain = [net(seed, build=Skipping) for seed in (1, 2)]
    for _ in range(2):
        for model in models:
            model.zero_grad()
        loss(models, mesh.rank).backward()
    (sum(loss(plain, rank) for rank in range(mesh.size)) / mesh.size).backward()
    for model, expected in zip(models, plain):
        for found, parameter in zip(model.parameters(), expected.parameters()):
            assert torch.allclose(found.grad, parameter.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", ("powersgd:1", "topk:0.5", "bf16"))
@pytest.mark.parametrize("bucket_bytes", (1, 1 << 20))
def test_models_may_come_in_any_order_where_their_sums_take_several_steps(mesh, bucket_bytes, compress):
    """The one that was called last ends first."""

    def gradients(order):
        models = [DataParallel(net(seed), mesh, bucket_bytes=bucket_bytes, compress=compress) for seed in (1, 2, 3)]
        for _ in range(2):
            losses = {each: loss_of(models[each], share(0, mesh)) for each in order}
            for model in models:
                model.zero_grad()
            sum(losses[each] for each in order).backward()
        return [each.grad for model in models for each in model.parameters()]

    shuffled = [(0, 1, 2), (2, 1, 0), (1, 2, 0)][mesh.rank % 3]
    for found, expected in zip(gradients(shuffled), gradients((0, 1, 2))):
        assert (found is None) == (expected is None)
        assert found is None or torch.allclose(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_leave_through_different_models_are_told_so(comm):
    mesh = Mesh(comm.Dup())  # not given back: messages are left on it
    models = [DataParallel(net(seed), mesh) for seed in (1, 2)]
    with pytest.raises(CollectiveMismatch, match="backward of model 0.*backward of model 1|model 1.*model 0"):
        loss_of(models[mesh.rank == 1], share(0, mesh)).backward()
    mesh.close()
    mesh.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_goes_on_alone_after_a_failed_backward_is_told_so(comm):
    mesh = Mesh(comm.Dup())  # not given back: messages are left on it
    model = DataParallel(net(), mesh, bucket_bytes=1)

    def fail(gradient):
        raise ArithmeticError("planted")

    if mesh.rank == 1:
        planted = model.module.first.bias.register_hook(fail)
        with pytest.raises(ArithmeticError):
            loss_of(model, share(0, mesh)).backward()
        planted.remove()
    with pytest.raises(CollectiveMismatch, match=r"gradients \d"):  # which one depends on how far each has come
        loss_of(model, share(1, mesh)).backward()
    mesh.close()
    mesh.close()


@pytest.mark.mpi
def test_gradients_that_are_only_computed_are_this_ranks_own_and_ask_nobody(mesh):
    model, plain = DataParallel(net(), mesh), net()
    before = [vars(counters).copy() for counters in (mesh.data.ring.counters, model._gradients.counters)]
    if mesh.rank == 0:
        inputs = rows(0, 3).requires_grad_()
        for pick in (lambda net: [inputs], lambda net: [net.first.weight], lambda net: [net.last.bias, inputs]):
            found = torch.autograd.grad(loss_of(model, inputs), pick(model.module))
            expected = torch.autograd.grad(loss_of(plain, inputs), pick(plain))
            assert all(map(torch.equal, found, expected))
    assert [vars(counters) for counters in (mesh.data.ring.counters, model._gradients.counters)] == before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.mpi
def test_a_backward_for_some_parameters_is_synchronised(mesh):
    model, plain = DataParallel(net(), mesh), net()
    loss_of(model, share(0, mesh)).backward(inputs=[model.module.last.bias])
    mean_loss(plain, 0, mesh).backward(inputs=[plain.last.bias])
    assert torch.allclose(model.module.last.bias.grad, plain.last.bias.grad, rtol=1e-10)
    assert model.module.first.weight.grad is None
