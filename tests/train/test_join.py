"""Loops of unequal length: nobody waits for ever, and all ranks end with the same weights and optimizer state."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from hpctrain import DataParallel, Mesh
from hpctrain.train.join import as_call
from tests.train.loops import assert_close, assert_same_everywhere, loss_of, net, rows

CLIP = 0.2


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


def batches(rank: int, count: int) -> list[torch.Tensor]:
    return [rows(100 * rank + number, 3) for number in range(count)]


class Update:
    """Optimizer, clipping and scheduler of one model."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.norms = []

    def clip(self):
        self.norms.append(float(clip_grad_norm_(self.model.parameters(), CLIP)))

    def step(self):
        self.clip()
        self.optimizer.step()
        self.scheduler.step()


def reference(counts, reduction="mean"):
    """In one process: the gradient over those ranks that still have a batch."""
    plain = net()
    update = Update(plain)
    for number in range(max(counts)):
        plain.zero_grad()
        losses = [loss_of(plain, batches(rank, n)[number]) for rank, n in enumerate(counts) if n > number]
        (sum(losses) / (len(losses) if reduction == "mean" else 1)).backward()
        update.step()
    return update


def assert_same_state(mesh, update, expected):
    assert_close(update.model.module, expected.model)
    assert update.norms == pytest.approx(expected.norms, rel=1e-9)
    assert update.scheduler.last_epoch == expected.scheduler.last_epoch
    assert update.scheduler.get_last_lr() == expected.scheduler.get_last_lr()
    states = [update.optimizer.state[parameter] for parameter in update.model.parameters()]
    for found, parameter in zip(states, expected.model.parameters()):
        wanted = expected.optimizer.state[parameter]
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[key], wanted[key], rtol=1e-9, atol=1e-13) for key in wanted)
    tensors = [tensor for state in states for tensor in state.values()]
    assert_same_everywhere(mesh, [*update.model.parameters(), *tensors])


COUNTS = {
    "the last rank has most": lambda rank, size: 2 + rank,
    "rank 0 has most": lambda rank, size: 2 + size - rank,
    "one rank has none": lambda rank, size: 0 if rank == size - 1 else 4,
    "all have equally many": lambda rank, size: 3,
    "nobody has any": lambda rank, size: 0,
}


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("which", COUNTS)
def test_ranks_with_fewer_batches_end_like_the_others(mesh, which, reduction):
    counts = [COUNTS[which](rank, mesh.size) for rank in range(mesh.size)]
    model = DataParallel(net(), mesh, reduction)
    update = Update(model)
    with model.join(update.clip, update.optimizer, update.scheduler):
        for batch in batches(mesh.rank, counts[mesh.rank]):
            model.zero_grad()
            loss_of(model, batch).backward()
            update.step()
    assert_same_state(mesh, update, reference(counts, reduction) if max(counts) else Update(net()))


@pytest.mark.mpi
def test_accumulation_goes_with_it(mesh):
    """Two pieces of a batch, the first under no_sync: the gradient is that of the whole."""
    counts = [2 + 2 * rank for rank in range(mesh.size)]
    model = DataParallel(net(), mesh)
    update = Update(model)
    with model.join(update):
        for batch in batches(mesh.rank, counts[mesh.rank]):
            model.zero_grad()
            with model.no_sync():
                (loss_of(model, batch) / 3).backward()
            (2 * loss_of(model, batch) / 3).backward()
            update.step()
    assert_same_state(mesh, update, reference(counts))


@pytest.mark.mpi
def test_what_was_not_synchronised_is_left_out(mesh):
    """Rank 0 adds up one batch too many under no_sync, and is done."""
    counts = [1] + [3] * (mesh.size - 1)
    model = DataParallel(net(), mesh)
    update = Update(model)
    with model.join(update):
        for batch in batches(mesh.rank, counts[mesh.rank]):
            model.zero_grad()
            loss_of(model, batch).backward()
            update.step()
        if mesh.rank == 0:
            with model.no_sync():
                loss_of(model, rows(999, 3)).backward()
    assert_same_state(mesh, update, reference(counts))


@pytest.mark.mpi
def test_it_may_be_entered_every_epoch_and_training_goes_on_without_it(mesh):
    model, counts = DataParallel(net(), mesh), [1 + rank for rank in range(mesh.size)]
    update = Update(model)
    for _ in range(2):
        with model.join(update):
            for batch in batches(mesh.rank, counts[mesh.rank]):
                model.zero_grad()
                loss_of(model, batch).backward()
                update.step()
    assert len(update.norms) == 2 * max(counts)
    model.zero_grad()
    loss_of(model, rows(0, 4 * mesh.size)[mesh.rank :: mesh.size]).backward()
    update.step()
    assert_same_everywhere(mesh, model.parameters())


@pytest.mark.mpi
def test_gradients_that_are_global_already_are_not_counted_again(mesh):
    """Nobody calls zero_grad: gradients of all batches add up, also on the ranks that were done early."""
    counts = [1 + rank for rank in range(mesh.size)]
    for reduction in ("mean", "sum"):
        model, plain = DataParallel(net(), mesh, reduction), net()
        with model.join(lambda: None):
            for batch in batches(mesh.rank, counts[mesh.rank]):
                loss_of(model, batch).backward()
        for number in range(max(counts)):
            losses = [loss_of(plain, batches(rank, n)[number]) for rank, n in enumerate(counts) if n > number]
            (sum(losses) / (len(losses) if reduction == "mean" else 1)).backward()
        for found, expected in zip(model.parameters(), plain.parameters()):
            assert (found.grad is None) == (expected.grad is None)
            assert found.grad is None or torch.allclose(found.grad, expected.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.mpi
def test_an_exception_inside_comes_out_at_once(mesh):
    model = DataParallel(net(), mesh)
    with pytest.raises(ArithmeticError), model.join(lambda: None):
        loss_of(model, rows(0, 3)).backward()
        raise ArithmeticError
    model.zero_grad()
    loss_of(model, rows(0, 3)).backward()
    assert model.module.first.weight.grad is not None


def test_what_is_no_update_is_refused_and_join_is_not_nested():
    model = DataParallel(net(), Mesh(None))
    with pytest.raises(ValueError, match="join: int is no update"), model.join(3):
        pass
    with pytest.raises(ValueError, match="already inside a join"), model.join(), model.join():
        pass
    mesh = Mesh(None)
    first, second = DataParallel(net(), mesh), DataParallel(net(), mesh)
    for _ in range(2):
        with pytest.raises(ValueError, match="join: .*another model; one model at a time"), first.join(), second.join():
            pass
    calls = []
    assert as_call(calls.clear) == calls.clear
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert as_call(optimizer) == optimizer.step
