"""A loop of one's own on many ranks is the loop of one process, whatever the loop does with its gradients."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from hpctrain import DataParallel, Mesh
from hpctrain.comm.signature import CollectiveMismatch
from tests.train.loops import WIDTH, assert_close, assert_same_everywhere, loss_of, mean_loss, net, rows, share


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


def train(model, loss, steps=10, to_none=True, clip=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    norms = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        loss(model, step).backward()
        if clip:
            norms.append(float(clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        scheduler.step()
    return optimizer, norms


@pytest.mark.mpi
@pytest.mark.parametrize("to_none", (True, False))
@pytest.mark.parametrize("clip", (None, 0.05))
@pytest.mark.parametrize("bucket_bytes", (1, 1 << 20))
def test_many_ranks_equal_one_process(mesh, to_none, clip, bucket_bytes):
    model, plain = DataParallel(net(mesh.rank), mesh, bucket_bytes=bucket_bytes), net()
    optimizer, norms = train(model, lambda model, step: loss_of(model, share(step, mesh)), 20, to_none, clip)
    _, expected = train(plain, lambda model, step: mean_loss(model, step, mesh), 20, to_none, clip)
    assert_close(model.module, plain)
    assert norms == pytest.approx(expected, rel=1e-10)
    assert_same_everywhere(mesh, model.parameters())
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert_same_everywhere(mesh, moments)
    assert model.module.never.weight.grad is None
    steps = int(optimizer.state[model.module.sometimes.weight]["step"])
    assert 0 < steps <= 20 and optimizer.state[model.module.first.weight]["step"] == 20


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_gradients_are_global_when_backward_returns(mesh, reduction):
    model, plain = DataParallel(net(mesh.rank), mesh, reduction), net()
    loss_of(model, share(0, mesh)).backward()
    (mean_loss(plain, 0, mesh) * (mesh.size if reduction == "sum" else 1)).backward()
    for (name, found), expected in zip(model.module.named_parameters(), plain.parameters()):
        assert (found.grad is None) == (expected.grad is None), name
        assert found.grad is None or torch.allclose(found.grad, expected.grad, rtol=1e-10, atol=1e-14), name


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("pattern", ("gg", "lg", "llg", "glg", "gglg", "gzlzg", "lzg", "gsg", "gsl"))
def test_backwards_in_a_row_add_up_and_count_nothing_twice(mesh, reduction, pattern):
    """g: a global backward, l: one under no_sync, z: zero_grad() with None, s: with zeros."""
    model, plain = DataParallel(net(), mesh, reduction), net()
    factor = mesh.size if reduction == "sum" else 1
    for step, what in enumerate(pattern + "g"):
        if what in "zs":
            for each in (model, plain):
                each.zero_grad(set_to_none=what == "z")
            continue
        if what == "l":
            with model.no_sync():
                loss_of(model, share(step, mesh)).backward()
        else:
            loss_of(model, share(step, mesh)).backward()
        (mean_loss(plain, step, mesh) * factor).backward()
    for (name, found), expected in zip(model.module.named_parameters(), plain.parameters()):
        assert (found.grad is None) == (expected.grad is None), name
        assert found.grad is None or torch.allclose(found.grad, expected.grad, rtol=1e-10, atol=1e-13), name


@pytest.mark.mpi
def test_what_a_parameter_got_once_does_not_come_back_when_it_is_not_used(mesh):
    model = DataParallel(net(), mesh)
    loss_of(model, torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    assert model.module.sometimes.weight.grad.abs().sum() > 0
    model.zero_grad()
    loss_of(model, -torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    assert model.module.sometimes.weight.grad is None and model.module.first.weight.grad is not None


@pytest.mark.mpi(min_size=2)
def test_a_parameter_that_one_rank_used_has_a_global_gradient_on_all(mesh):
    model, plain = DataParallel(net(), mesh), net()
    sign = 1.0 if mesh.rank == 1 else -1.0
    loss_of(model, sign * torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    loss_of(plain, torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    assert torch.allclose(model.module.sometimes.weight.grad, plain.sometimes.weight.grad / mesh.size, rtol=1e-12)
    assert model.module.never.bias.grad is None


@pytest.mark.mpi
def test_a_forward_without_gradients_says_nothing(mesh):
    model = DataParallel(net(), mesh)
    before = vars(mesh.data.ring.counters).copy()
    with torch.no_grad():
        model.eval()
        model(share(0, mesh))
    if mesh.rank == 0:
        model(share(0, mesh))
    assert vars(mesh.data.ring.counters) == before


@pytest.mark.mpi
def test_accumulation_moves_gradients_once_an_update(mesh):
    sent = {}
    for pieces in (1, 4):
        model = DataParallel(net(), mesh, algorithm="ring")
        before = model._gradients.counters.bytes_sent
        for piece in range(pieces - 1):
            with model.no_sync():
                loss_of(model, share(piece, mesh)).backward()
        loss_of(model, share(9, mesh)).backward()
        sent[pieces] = model._gradients.counters.bytes_sent - before
    assert sent[1] == sent[4] and (sent[1] > 0) == (mesh.size > 1)


@pytest.mark.mpi
def test_buckets_begin_to_move_while_the_backward_runs(mesh):
    model = DataParallel(net(), mesh, bucket_bytes=1)
    flat, moved, started = model._gradients._flat, [], model._gradients._sums.start
    flat.on_ready = lambda number: (moved.append(sum(flat.touched.values())), started(number))
    torch.nn.init.zeros_(model.module.first.weight)
    loss_of(model, torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    assert moved[0] < len(flat.parameters) - 2


@pytest.mark.mpi
@pytest.mark.parametrize("bucket_bytes", (1, 1 << 20))
def test_a_backward_that_fails_does_not_spoil_the_next(mesh, bucket_bytes):
    model, plain = DataParallel(net(), mesh, bucket_bytes=bucket_bytes), net()

    def fail(gradient):
        raise ArithmeticError("planted")

    planted = model.module.first.bias.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, torch.ones(2, WIDTH, dtype=torch.float64)).backward()  # the same buckets move on all ranks
    planted.remove()
    for step in (1, 2):
        model.zero_grad()
        plain.zero_grad()
        loss_of(model, share(step, mesh)).backward()
        mean_loss(plain, step, mesh).backward()
        assert torch.allclose(model.module.first.weight.grad, plain.first.weight.grad, rtol=1e-10)


@pytest.mark.mpi
def test_a_backward_that_fails_does_not_spoil_one_whose_forward_was_before(mesh):
    model, plain = DataParallel(net(), mesh), net()
    failing, loss = loss_of(model, share(0, mesh)), loss_of(model, share(1, mesh))

    def fail(gradient):
        raise ArithmeticError("planted")

    planted = model.module.first.bias.register_hook(fail)
    with pytest.raises(ArithmeticError):
        failing.backward()
    planted.remove()
    model.zero_grad()
    loss.backward()
    mean_loss(plain, 1, mesh).backward()
    assert torch.allclose(model.module.first.weight.grad, plain.first.weight.grad, rtol=1e-10)


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("synchronised", (True, False))
def test_a_global_gradient_that_was_replaced_is_global(mesh, reduction, synchronised):
    model, plain = DataParallel(net(), mesh, reduction), net()
    factor = mesh.size if reduction == "sum" else 1
    for step in range(2):
        if step == 1:
            kept = model.module.last.weight.grad = model.module.last.weight.grad * 0.5
            before = kept.clone()
            plain.last.weight.grad *= 0.5
            if not synchronised:
                with model.no_sync():
                    loss_of(model, share(1, mesh)).backward()
                (mean_loss(plain, 1, mesh) * factor).backward()
        loss_of(model, share(step, mesh)).backward()
        (mean_loss(plain, step, mesh) * factor).backward()
    assert torch.allclose(model.module.last.weight.grad, plain.last.weight.grad, rtol=1e-10)
    assert reduction == "mean" or torch.equal(kept, before)


TAKEN_AWAY = {
    "grad.data": lambda model: [setattr(p.grad, "data", p.grad.clamp(-1, 1)) for p in model.parameters()],
    "memory_format": lambda model: model.to(memory_format=torch.channels_last),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.mpi
@pytest.mark.parametrize("how", TAKEN_AWAY)
@pytest.mark.parametrize("to_none", (True, False))
def test_gradients_stay_global_whatever_torch_does_with_their_storage(mesh, how, to_none):
    def build():
        return torch.nn.Sequential(torch.nn.Unflatten(1, (1, WIDTH, 1)), torch.nn.Conv2d(1, 2, (3, 1)))

    def loss(model, batch):
        return model(batch).square().mean()

    model, plain = DataParallel(net(build=build), mesh), net(build=build)
    for step in range(3):
        model.zero_grad(set_to_none=to_none)
        plain.zero_grad()
        loss(model, share(step, mesh)).backward()
        loss(plain, rows(step, 4 * mesh.size)).backward()
        for found, expected in zip(model.parameters(), plain.parameters()):
            assert torch.allclose(found.grad, expected.grad, rtol=1e-10), step
        TAKEN_AWAY[how](model)


@pytest.mark.mpi
def test_a_gradient_that_somebody_put_there_is_reduced_too(mesh):
    model = DataParallel(net(), mesh)
    model.module.never.bias.grad = torch.full((3,), float(mesh.rank), dtype=torch.float64)
    loss_of(model, share(0, mesh)).backward()
    assert model.module.never.bias.grad.tolist() == pytest.approx([(mesh.size - 1) / 2] * 3)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_different_things_are_told_so(comm):
    mesh = Mesh(comm.Dup())  # not given back: messages are left on it
    model = DataParallel(net(), mesh)
    with pytest.raises(CollectiveMismatch, match="backward of model 0.*barrier|barrier.*backward of model 0"):
        if mesh.rank == 1:
            mesh.barrier()
        else:
            loss_of(model, share(0, mesh)).backward()


def test_alone_it_is_the_plain_loop_bit_for_bit():
    with Mesh(None) as mesh:
        model, plain = DataParallel(net(), mesh), net()
        train(model, lambda model, step: loss_of(model, rows(step, 6)), clip=0.1)
        train(plain, lambda model, step: loss_of(model, rows(step, 6)), clip=0.1)
    for found, expected in zip(model.parameters(), plain.parameters()):
        assert torch.equal(found, expected)
