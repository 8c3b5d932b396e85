"""B and then W give the bits of one whole backward, and what cannot be split gets all of its gradient in B."""

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hpctrain.model.precision import Precision
from hpctrain.model.split import SplitBackward
from hpctrain.model.stage import build_stage
from hpctrain.tasks import convnet, gpt

PRECISIONS = ("float32", "float64", "bf16-mixed")


class Function(nn.Module):
    """A square matrix and a vector, and what `function(self, x)` makes of them."""

    def __init__(self, function, width=6):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width))
        self.function = function

    def forward(self, x):
        return self.function(self, x)

    def linear(self, x):
        return functional.linear(x, self.weight, self.bias)


def with_zero_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def leaf_like(x):
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


def accumulate_in(model):
    parameters, seen = dict(model.named_parameters()), []

    def accumulate(name, gradient):
        seen.append(name)
        parameters[name].grad.add_(gradient)

    accumulate.seen, accumulate.model = seen, model
    return accumulate


def compare(model, inputs, precision="float32", put_off=2):
    """One model whole, a copy of it split, over the micro-batches `inputs`; W is `put_off` behind B.

    Returns the SplitBackward, and the names that W gave, of each micro-batch.
    """
    precision = Precision(precision)
    whole = with_zero_gradients(precision.convert(model))
    parts = with_zero_gradients(copy.deepcopy(whole))
    split = SplitBackward([parts], dict(parts.named_parameters()))
    waiting, names = [], []
    for number, x in enumerate(inputs):
        x = x.to(precision.dtype) if x.is_floating_point() else x
        ours, theirs = leaf_like(x), leaf_like(x)
        with precision.forward():
            expected = whole(theirs)
            with split.forward():
                outputs = parts(ours)
        assert torch.equal(outputs, expected)
        gradient = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(number)).to(outputs.dtype)
        expected.backward(gradient)
        outputs.backward(gradient.clone())
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        waiting.append(split.take())
        if len(waiting) > put_off:
            names.append(run(waiting.pop(0), parts))
    names += [run(deferred, parts) for deferred in waiting]
    for (name, mine), theirs in zip(parts.named_parameters(), whole.parameters()):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    return split, names


def run(deferred, model):
    accumulate = accumulate_in(model)
    deferred.run(accumulate)
    assert not deferred and len(set(accumulate.seen)) == len(accumulate.seen)
    return set(accumulate.seen)


def batches(*shape, requires_grad=True, number=4):
    torch.manual_seed(1)
    return [torch.randn(shape).requires_grad_(requires_grad) for _ in range(number)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize(
    "inputs",
    (
        batches(5, 6),
        batches(3, 5, 6),
        batches(2, 3, 4, 6),
        batches(6),
        batches(0, 6),
        batches(5, 6, requires_grad=False),
    )
    + ([x.detach().T.requires_grad_() for x in batches(6, 5)], [x.transpose(0, 1) for x in batches(5, 3, 6)]),
    ids=("2d", "3d", "4d", "1d", "no rows", "first layer", "transposed", "not contiguous"),
)
def test_a_linear_layer(inputs, bias, precision):
    split, names = compare(
        nn.Sequential(nn.Linear(6, 4, bias=bias), nn.Tanh()), [leaf_like(x) for x in inputs], precision
    )
    assert names == [{"0.weight", "0.bias"} if bias else {"0.weight"}] * 4 and split.unsplit == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize(
    ("layer", "shape"),
    (
        (partial(nn.Conv1d, 4, 6, 3, stride=2), (2, 4, 9)),
        (partial(nn.Conv2d, 4, 6, 3, padding=1), (2, 4, 7, 8)),
        (partial(nn.Conv2d, 4, 6, (3, 2), stride=(2, 1), padding="valid", dilation=2), (2, 4, 9, 8)),
        (partial(nn.Conv2d, 4, 8, 3, padding="same", groups=4), (3, 4, 7, 7)),
        (partial(nn.Conv2d, 4, 4, 1), (4, 5, 5)),
        (partial(nn.Conv2d, 4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 5, 5)),
        (partial(nn.Conv3d, 2, 3, 2), (2, 2, 4, 5, 4)),
        (partial(nn.ConvTranspose2d, 4, 6, 3, stride=2), (2, 4, 5, 5)),
    ),
)
def test_a_convolution(layer, shape, bias, precision):
    model = nn.Sequential(layer(bias=bias), nn.ReLU(inplace=True))
    split, names = compare(model, batches(*shape), precision, put_off=1)
    assert names == [{"0.weight", "0.bias"} if bias else {"0.weight"}] * 4 and split.unsplit == []
    compare(model, batches(*shape, requires_grad=False), precision)
    compare(model.to(memory_format=torch.channels_last) if len(shape) == 4 else model, batches(*shape), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_matrices_and_kernels_of_the_tasks_models_are_split(precision):
    text = build_stage(gpt.layer_factories(2, 16, 2, 8, 0.0, 32)[1:], 0, Precision(precision), first=1)
    pictures = build_stage(convnet.layer_factories((3, 8, 8), 10, 3, 8, 0.0), 0, Precision(precision))
    for stage, shape in ((text, (2, 8, 16)), (pictures, (2, 3, 8, 8))):
        split, names = compare(nn.Sequential(*stage.layers), batches(*shape), precision)
        matrices = {name for name, parameter in split.parameters.items() if parameter.dim() >= 2}
        assert split.unsplit == [] and all(matrices <= each for each in names)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_that_two_layers_take_and_a_layer_that_runs_twice(precision):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

        def forward(self, x):
            return self.a(x) * self.b(x) + self.c(self.c(x).tanh()) - self.c(x * 2)

    split, names = compare(Model(), batches(5, 6), precision)
    assert names == [set(split.names)] * 4 == [{"a.weight", "a.bias", "b.weight", "c.weight", "c.bias"}] * 4


@pytest.mark.parametrize("frozen", ("weight", "bias"))
def test_a_layer_of_which_one_half_is_frozen(frozen):
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    getattr(whole[0], frozen).requires_grad_(False)
    parts = copy.deepcopy(whole)
    split, x, given = SplitBackward([parts], dict(parts.named_parameters())), torch.randn(5, 6), {}
    whole(x).square().sum().backward()
    with split.forward():
        loss = parts(x).square().sum()
    loss.backward()
    split.take().run(given.__setitem__)
    assert split.unsplit == [] and f"0.{frozen}" not in split.names
    for (name, mine), theirs in zip(parts.named_parameters(), whole.parameters()):
        gradient = given.get(name, mine.grad)
        assert (gradient is None) == (theirs.grad is None) and (gradient is None or torch.equal(gradient, theirs.grad))
        assert name not in given or mine.grad is None


def test_only_b_is_computed_until_w_is_asked_for():
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    split = SplitBackward([model], dict(model.named_parameters()))
    x = torch.ones(3, 6)
    with split.forward():
        outputs = model(x)
    outputs.sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is None and model[1].weight.grad is not None
    deferred = split.take()
    assert deferred and not split.take()
    assert [tuple(tensor.shape) for tensor in deferred.tensors()] == [(3, 6), (3, 4)]
    assert next(deferred.tensors()).data_ptr() == x.data_ptr(), "no copy"
    deferred.run(lambda name, gradient: None)
    assert list(deferred.tensors()) == []


def test_each_backward_has_its_own_work():
    model = nn.Linear(6, 4)
    split = SplitBackward([model], dict(model.named_parameters()))
    losses, work = [], []
    for x in batches(3, 6):
        with split.forward():
            losses.append(model(x).square().sum())
    for loss in losses[::-1]:
        loss.backward()
        work.insert(0, split.take())
    for x, deferred in zip(batches(3, 6), work):
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        given = {}
        deferred.run(given.__setitem__)
        assert all(torch.equal(given[name], gradient) for name, gradient in zip(("weight", "bias"), expected))


def test_two_micro_batches_in_one_backward_are_added_before_they_are_handed_over():
    model = nn.Linear(6, 4)
    split = SplitBackward([model], dict(model.named_parameters()))
    losses = []
    for x in batches(3, 6):
        with split.forward():
            losses.append(model(x).square().sum())
    sum(losses).backward()
    accumulate = accumulate_in(with_zero_gradients(copy.deepcopy(model)))
    split.take().run(accumulate)
    assert sorted(accumulate.seen) == ["bias", "weight"]
    expected = torch.autograd.grad(sum(model(x).square().sum() for x in batches(3, 6)), list(model.parameters()))
    assert all(torch.equal(found.grad, each) for found, each in zip(accumulate.model.parameters(), expected))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("make", "unsplit"),
    (
        (Shared, ["a.weight"]),
        (lambda: parametrizations.orthogonal(nn.Linear(6, 6)), ["parametrizations.weight.original"]),
        (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), None),
        (lambda: Function(lambda self, x: x * 2 @ self.weight), ["weight"]),
        (lambda: Function(lambda self, x: self.linear(x * 2 @ self.weight.T)), ["weight"]),
        (
            lambda: Function(lambda self, x: x * functional.linear(x, torch.stack([self.bias] * 6), self.bias)),
            ["weight"],
        ),
        (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), ["self_attn.in_proj_weight", "self_attn.out_proj.weight"]),
    ),
    ids=("shared", "parametrized", "weight_norm", "matmul", "both", "bias", "attention"),
)
def test_what_is_not_split(make, unsplit, precision):
    torch.manual_seed(0)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            outputs = self.inner(x * 1)
            return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    split, names = compare(First(), batches(3, 2, 6), precision)
    if unsplit is not None:
        assert split.unsplit == [f"inner.{name}" for name in unsplit]
    assert set().union(*names).isdisjoint(split.unsplit)


def test_a_recurrent_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.LSTM(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.inner(x)[0])

    split, names = compare(Model(), batches(3, 2, 6))
    assert split.unsplit == ["inner.weight_ih_l0", "inner.weight_hh_l0"]
    assert names == [{"last.weight", "last.bias"}] * 4


@pytest.mark.parametrize("shape", ((5, 6), (3, 5, 6)))
@pytest.mark.parametrize("bias", (True, False))
def test_what_works_in_place_on_the_outputs_and_how_little_is_kept_of_them(shape, bias):
    model = nn.Sequential(nn.Linear(6, 6, bias=bias), nn.ReLU(inplace=True), nn.Linear(6, 6, bias=bias))
    compare(model, batches(*shape))
    split = SplitBackward([model], dict(model.named_parameters()))
    with split.forward():
        outputs = model[0](batches(*shape)[0])
    storage = weakref.ref(outputs.untyped_storage())
    outputs.sum().backward()
    deferred = split.take()
    assert storage() is not None
    del outputs
    assert storage() is None and len(list(deferred.tensors())) == 2


def test_a_hook_sees_the_whole_gradient():
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    split = SplitBackward([layer], dict(layer.named_parameters()))
    with split.forward():
        loss = layer(torch.ones(3, 6)).sum()
    loss.backward()
    assert torch.equal(layer.weight.grad, torch.full((6, 6), 6.0)) and not split.take()
    assert split.unsplit == ["weight"]


def test_a_parameter_that_turns_out_to_be_used_in_two_ways():
    model = Function(lambda self, x: self.linear(x) + x @ self.weight)
    split, names = compare(model, batches(5, 6))
    assert split.unsplit == ["weight"] and names == [set()] * 4


def test_an_embedding_and_a_head_of_one_weight():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.inner = nn.Embedding(7, 6), nn.Linear(6, 6)

        def forward(self, tokens):
            return functional.linear(self.inner(self.token(tokens)), self.token.weight)

    split, names = compare(Model(), [torch.arange(6).reshape(2, 3)] * 3)
    assert split.unsplit == ["token.weight"] and names == [{"inner.weight", "inner.bias"}] * 3


def test_parameters_that_other_stages_share_are_left_out_by_leaving_them_out():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    split = SplitBackward([model], {n: p for n, p in model.named_parameters() if n != "0.weight"})
    with split.forward():
        loss = model(torch.ones(2, 6)).sum()
    loss.backward()
    assert split.names == {"0.bias", "1.weight", "1.bias"}
    assert model[0].weight.grad is not None and model[1].weight.grad is None


@pytest.mark.parametrize("reentrant", (True, False))
def test_a_checkpoint_within_the_model(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = (
                nn.Linear(6, 6),
                nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
                nn.Linear(6, 3),
            )

        def forward(self, x):
            return self.last(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))

    split, names = compare(Model(), batches(4, 6))
    assert names == [{"first.weight", "first.bias", "last.weight", "last.bias"}] * 4
    assert split.unsplit == ["inner.0.weight"]


def test_a_forward_that_runs_again_before_its_backward():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    split, x = SplitBackward([model], dict(model.named_parameters())), torch.ones(2, 6)
    with split.forward(), torch.no_grad():
        first = model(x)
    assert first.grad_fn is None and not split.take()
    with split.forward():
        again = model(x)
        again.sum().backward()
    given = {}
    split.take().run(given.__setitem__)
    assert torch.equal(first, again) and set(given) == split.names and split.unsplit == []
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.equal(given[name], each) for (name, _), each in zip(model.named_parameters(), expected))


def test_evaluation_and_what_runs_outside_are_as_ever():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.MultiheadAttention(6, 2))[:2]
    split, x = SplitBackward([model], dict(model.named_parameters())), torch.ones(2, 6)
    model(x).sum().backward()
    assert model[0].weight.grad is not None and not split.take()
    model.eval()
    with torch.no_grad(), split.forward():
        inside = model(x)
    assert torch.equal(inside, model(x)) and not split.take()


def test_gradients_that_the_loss_itself_asks_for():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def loss(x):
        outputs = model(x).sum()
        (slope,) = torch.autograd.grad(outputs, x, create_graph=True)
        norm = torch.autograd.grad(outputs, model[2].weight, retain_graph=True)[0].norm()
        (unused,) = torch.autograd.grad(outputs, x, retain_graph=True)
        return outputs * norm + slope.square().sum() + unused.sum()

    for name in PRECISIONS:
        precision = Precision(name)
        precision.convert(model)
        split = SplitBackward([model], dict(model.named_parameters()))
        x = torch.randn(3, 6, dtype=precision.dtype, requires_grad=True)
        with precision.forward():
            expected = torch.autograd.grad(loss(x), list(model.parameters()))
            with split.forward():
                value = loss(x)
        with_zero_gradients(model)
        value.backward()
        split.take().run(accumulate_in(model))
        tolerance = {"atol": 0.1, "rtol": 0.1} if name == "bf16-mixed" else {}
        for parameter, gradient in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.grad, gradient, **tolerance)


def test_vmap_over_a_layer():
    layer = nn.Linear(6, 6)
    split = SplitBackward([layer], dict(layer.named_parameters()))
    with split.forward():
        loss = torch.func.vmap(layer)(torch.ones(3, 6)).sum()
    loss.backward()
    assert torch.equal(layer.weight.grad, torch.full((6, 6), 3.0)) and not split.take()


@pytest.mark.parametrize(
    ("call", "error"),
    (
        (lambda layer: layer(torch.ones(2, 5)), RuntimeError),
        (lambda layer: layer(torch.ones(2, 6).double()), RuntimeError),
        (lambda layer: layer(None), TypeError),
        (lambda layer: functional.linear(torch.ones(2, 6), layer.weight, 3), TypeError),
        (lambda layer: functional.linear(torch.ones(2, 6), layer.weight, wrong=1), TypeError),
        (lambda layer: functional.linear(torch.ones(2, 6)), TypeError),
        (lambda layer: functional.conv2d(torch.ones(2, 6), layer.weight), RuntimeError),
    ),
)
def test_errors_read_like_those_of_torch(call, error):
    layer = nn.Linear(6, 6)
    split = SplitBackward([layer], dict(layer.named_parameters()))
    with pytest.raises(error) as expected:
        call(layer)
    with split.forward(), pytest.raises(error) as found:
        call(layer)
    assert str(found.value) == str(expected.value)


def test_weights_that_were_replaced_in_place_are_the_ones_that_count():
    layer = nn.Linear(6, 6, bias=False)
    split = SplitBackward([layer], dict(layer.named_parameters()))
    for value in (1.0, 2.0):
        layer.weight.data = torch.full((6, 6), value)
        x = torch.ones(1, 6, requires_grad=True)
        with split.forward():
            outputs = layer(x)
        outputs.sum().backward()
        assert outputs[0, 0] == 6 * value and x.grad[0, 0] == 6 * value and split.take()
