"""What may be wrapped and what is refused; what wrapping does to parameters, buffers and layers."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from hpctrain import DataParallel, Mesh
from hpctrain.train.errors import AgreedError
from tests.train.loops import WIDTH, Net, assert_same_everywhere, loss_of, mean_loss, net, rows, share


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


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
    mean_loss(plain, 0, mesh).backward()
    assert torch.allclose(model.module.last.weight.grad, plain.last.weight.grad, rtol=1e-10)


@pytest.mark.mpi
def test_a_layer_unfrozen_that_was_frozen_when_wrapped_is_refused_by_name(mesh):
    module = net()
    module.last.requires_grad_(False)
    model = DataParallel(module, mesh)
    module.last.requires_grad_(True)
    with pytest.raises(ValueError, match="last.weight required no gradient when the model was wrapped"):
        loss_of(model, share(0, mesh)).backward()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_built_different_models_are_told_the_first_difference(comm):
    for build, words in (
        (lambda rank: nn.Linear(2, 3 + (rank == 1)), r"weight torch.float32 \[3, 2\]"),
        (lambda rank: nn.Linear(2, 3, bias=rank != 1), "bias torch.float32"),
        (lambda rank: nn.Linear(2, 3).requires_grad_(True), None),
    ):
        mesh = Mesh(comm)
        if words:
            with pytest.raises(AgreedError, match="replica 1 built a different model: .*" + words):
                DataParallel(build(mesh.rank), mesh)
        else:
            with pytest.raises(AgreedError, match="bucket_bytes=1' on replica 0, 'bucket_bytes=2' on replica 1"):
                DataParallel(build(mesh.rank), mesh, bucket_bytes=1 + (mesh.rank == 1))
        mesh.close()


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


@pytest.mark.mpi
def test_running_statistics_weigh_by_the_rows_seen_in_training(mesh):
    """Rank r trains on r batches of r + 1 rows: an evaluation counts for nothing."""
    model = DataParallel(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)).double(), mesh)
    layers = [nn.BatchNorm1d(WIDTH).double() for _ in range(mesh.size)]
    for rank, layer in enumerate(layers):
        for number in range(rank):
            layer(rows(10 * rank + number, rank + 1))
            if rank == mesh.rank:
                model(rows(10 * rank + number, rank + 1))
    with torch.no_grad():
        model.eval()
        model(rows(0, 100 if mesh.rank == 0 else 1))
    model.average_statistics()
    weights = [rank * (rank + 1) for rank in range(mesh.size)]
    for name in ("running_mean", "running_var"):
        tensors = [weight * getattr(layer, name) for weight, layer in zip(weights, layers)]
        wanted = sum(tensors) / sum(weights) if mesh.size > 1 else getattr(layers[0], name)
        assert torch.allclose(getattr(model.module[0], name), wanted, rtol=1e-12)


def resize(module):
    module.never.bias.data = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize("backward_before", (True, False))
@pytest.mark.parametrize("convert", (nn.Module.float, nn.Module.bfloat16, resize))
def test_a_model_converted_after_wrapping_is_refused_by_name(convert, backward_before):
    model = DataParallel(net(), Mesh(None))
    if backward_before:
        loss_of(model, rows(0, 3)).backward()
    model.zero_grad()
    convert(model.module)
    with pytest.raises(ValueError, match=r"[\w.]+ is torch.* and was torch.float64 .*; convert the model, then wrap"):
        model(rows(0, 3, model.module.first.weight.dtype)).sum().backward()


def new_head(module):
    module.last = nn.Linear(7, WIDTH).double()


def assign(module):
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def normalise(module):
    nn.utils.parametrizations.weight_norm(module.last)


def prune(module):
    l1_unstructured(module.last, "weight", 0.5)


@pytest.mark.parametrize("change", (new_head, assign, normalise, prune))
def test_a_model_changed_after_wrapping_is_refused_by_name(change):
    model = DataParallel(net(), Mesh(None))
    change(model.module)
    with pytest.raises(ValueError, match=r"[\w.]+ was put there after wrapping; change the model, then wrap"):
        loss_of(model, rows(0, 3)).backward()


def test_an_old_gradient_of_a_frozen_parameter_does_not_matter():
    module = net()
    loss_of(module, rows(0, 3)).backward()
    module.first.requires_grad_(False)
    model = DataParallel(module, Mesh(None))
    loss_of(model, rows(0, 3)).backward()
    assert model.module.last.weight.grad is not None


@pytest.mark.parametrize("how", (copy.deepcopy, copy.copy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())))
def test_a_wrapped_model_is_not_copied_but_its_module_is(how):
    model = DataParallel(net(), Mesh(None))
    with pytest.raises(ValueError, match="DataParallel: a wrapped model .* copy or save model.module"):
        how(model)
    with pytest.raises(ValueError, match="model.module"):
        torch.optim.swa_utils.AveragedModel(model)
    how(model.module)
    DataParallel(copy.deepcopy(model.module), Mesh(None))
