"""A loop of one's own on many ranks is the loop of one process, whatever the loop does with its gradients."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from hpctrain import DataParallel, Mesh
from hpctrain.comm.signature import CollectiveMismatch
from hpctrain.train.errors import AgreedError
from tests.train.loops import WIDTH, Net, assert_close, assert_same_everywhere, loss_of, net, rows, share


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


def alone_loss(model, step, mesh, each=4):
    """The mean over the ranks of what each rank's loss is, in one process."""
    batches = [rows(step, each * mesh.size)[rank :: mesh.size] for rank in range(mesh.size)]
    return sum(loss_of(model, batch) for batch in batches) / mesh.size


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
    _, expected = train(plain, lambda model, step: alone_loss(model, step, mesh), 20, to_none, clip)
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
    (alone_loss(plain, 0, mesh) * (mesh.size if reduction == "sum" else 1)).backward()
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
        (alone_loss(plain, step, mesh) * factor).backward()
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
        model = DataParallel(net(), mesh)
        before = mesh.data.ring.counters.bytes_sent
        for piece in range(pieces - 1):
            with model.no_sync():
                loss_of(model, share(piece, mesh)).backward()
        loss_of(model, share(9, mesh)).backward()
        sent[pieces] = mesh.data.ring.counters.bytes_sent - before
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
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_parameters_of_any_precision(mesh, dtype, tolerance):
    model, plain = DataParallel(net(dtype=dtype), mesh), net(dtype=dtype)
    loss_of(model, share(0, mesh, dtype=dtype)).backward()
    losses = [loss_of(plain, rows(0, 4 * mesh.size, dtype)[rank :: mesh.size]) for rank in range(mesh.size)]
    (sum(losses) / mesh.size).backward()
    for found, expected in zip(model.parameters(), plain.parameters()):
        assert (found.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            assert found.grad.dtype == dtype
            assert (found.grad - expected.grad).abs().max() <= tolerance * max(1, expected.grad.abs().max())


@pytest.mark.mpi
def test_frozen_parameters_and_buffers_are_rank_0s_and_stay(mesh):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("shift", torch.randn(WIDTH))
            self.register_buffer("flag", torch.tensor(bool(torch.randn(()) > 0)))

        def forward(self, x):
            return self.layer(self.frozen(x)) + self.shift

    model, first = DataParallel(net(mesh.rank + 5, build=Mixed), mesh), net(5, build=Mixed)
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name
    loss_of(model, share(0, mesh)).backward()
    assert model.module.frozen.weight.grad is None and model.module.layer.weight.grad is not None


@pytest.mark.mpi
def test_a_layer_may_be_frozen_after_wrapping_and_unfrozen_again(mesh):
    model = DataParallel(net(), mesh)
    for thawed in (False, True, False, True):
        model.module.last.requires_grad_(thawed)
        model.zero_grad()
        loss_of(model, share(0, mesh)).backward()
        assert (model.module.last.weight.grad is not None) == thawed
    plain = net()
    alone_loss(plain, 0, mesh).backward()
    assert torch.allclose(model.module.last.weight.grad, plain.last.weight.grad, rtol=1e-10)


@pytest.mark.mpi
def test_a_layer_unfrozen_that_was_frozen_when_wrapped_is_refused_by_name(mesh):
    module = net()
    module.last.requires_grad_(False)
    model = DataParallel(module, mesh)
    module.last.requires_grad_(True)
    with pytest.raises(ValueError, match="last.weight required no gradient when the model was wrapped"):
        loss_of(model, share(0, mesh)).backward()


@pytest.mark.mpi
def test_a_backward_that_fails_does_not_spoil_the_next(mesh):
    model, plain = DataParallel(net(), mesh), net()

    def fail(gradient):
        raise ArithmeticError("planted")

    outputs = model(share(0, mesh))
    (outputs * 1).register_hook(fail)
    broken = outputs * 1
    broken.register_hook(fail)
    with pytest.raises(ArithmeticError):
        (broken.sum() + outputs.sum()).backward()
    model.zero_grad()
    loss_of(model, share(1, mesh)).backward()
    alone_loss(plain, 1, mesh).backward()
    assert torch.allclose(model.module.first.weight.grad, plain.first.weight.grad, rtol=1e-10)


@pytest.mark.mpi
def test_a_gradient_that_somebody_put_there_is_reduced_too(mesh):
    model = DataParallel(net(), mesh)
    model.module.never.bias.grad = torch.full((3,), float(mesh.rank), dtype=torch.float64)
    loss_of(model, share(0, mesh)).backward()
    assert model.module.never.bias.grad.tolist() == pytest.approx([(mesh.size - 1) / 2] * 3)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_built_different_models_are_told_the_first_difference(comm):
    for build, words in (
        (lambda rank: nn.Linear(2, 3 + (rank == 1)), r"weight torch.float32 \[3, 2\]"),
        (lambda rank: nn.Linear(2, 3, bias=rank != 1), "bias torch.float32"),
        (lambda rank: nn.Linear(2, 3).requires_grad_(True), None),
    ):
        mesh = Mesh(comm)
        if words:
            with pytest.raises(AgreedError, match="replica 1 built another model: .*" + words):
                DataParallel(build(mesh.rank), mesh)
        else:
            with pytest.raises(AgreedError, match="bucket_bytes=1' on replica 0, 'bucket_bytes=2' on replica 1"):
                DataParallel(build(mesh.rank), mesh, bucket_bytes=1 + (mesh.rank == 1))
        mesh.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_different_things_are_told_so(comm):
    mesh = Mesh(comm.Dup())  # not given back: messages are left on it
    model = DataParallel(net(), mesh)
    with pytest.raises(CollectiveMismatch, match="gradients 0.*barrier|barrier.*gradients 0"):
        if mesh.rank == 1:
            mesh.barrier()
        else:
            loss_of(model, share(0, mesh)).backward()


def refused(module, **settings):
    with pytest.raises(ValueError) as caught, Mesh(None) as mesh:
        DataParallel(module, mesh, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_train_this_way_is_refused_by_one_line():
    assert "no parameter of ReLU requires a gradient" in refused(nn.ReLU())
    assert "no parameter of Linear requires" in refused(nn.Linear(2, 2).requires_grad_(False))
    assert "1.weight is sparse" in refused(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))
    assert "gradient of weight is sparse" in refused(nn.EmbeddingBag(3, 2, sparse=True))
    assert "weight has no shape yet" in refused(nn.LazyLinear(3))
    assert "weight is on meta" in refused(nn.Linear(2, 2, device="meta"))
    assert "list is no torch.nn.Module" in refused([])
    assert "reduction='max': it is 'sum' or 'mean'" in refused(nn.Linear(2, 2), reduction="max")
    assert "bucket_bytes=0" in refused(nn.Linear(2, 2), bucket_bytes=0)
    module = nn.Linear(2, 2)
    wrapped = DataParallel(module, Mesh(None))
    assert "the model is wrapped already" in refused(wrapped)
    assert "0 is wrapped already" in refused(nn.Sequential(wrapped))
    assert "weight is wrapped already" in refused(module)


def test_a_sparse_gradient_of_another_layer_is_refused_when_it_comes():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 2))

        def forward(self, x):
            return nn.functional.embedding(x, self.table, sparse=True)

    model = DataParallel(Hidden(), Mesh(None))
    with pytest.raises(ValueError, match="gradient of table is sparse and cannot travel"):
        model(torch.tensor([1, 2])).sum().backward()


def test_alone_it_is_the_plain_loop_bit_for_bit():
    with Mesh(None) as mesh:
        model, plain = DataParallel(net(), mesh), net()
        train(model, lambda model, step: loss_of(model, rows(step, 6)), clip=0.1)
        train(plain, lambda model, step: loss_of(model, rows(step, 6)), clip=0.1)
    for found, expected in zip(model.parameters(), plain.parameters()):
        assert torch.equal(found, expected)


def test_a_state_of_the_module_has_the_names_of_the_module():
    model = DataParallel(Net(), Mesh(None))
    assert list(model.module.state_dict()) == list(Net().state_dict())


@pytest.mark.mpi
def test_batch_statistics_are_told_of_once_and_averaged_on_demand(mesh, capsys):
    model = DataParallel(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)).double(), mesh)
    told = capsys.readouterr().err
    assert told.count("\n") == (mesh.size > 1 and mesh.rank == 0)
    assert not told or re.match("hpctrain: 0: batch statistics are .*average_statistics()", told)
    inputs = [rows(rank, 8) for rank in range(mesh.size)]
    model(inputs[mesh.rank]).sum().backward()
    model.average_statistics()
    means = torch.stack([each.mean(0) for each in inputs])
    assert torch.allclose(model.module[0].running_mean, 0.1 * means.mean(0), rtol=1e-12)
    assert_same_everywhere(mesh, model.module.buffers())
