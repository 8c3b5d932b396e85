"""What is packed on one side of a border comes out on the other, and gradients come back to where they belong."""

import dataclasses
import gc
import json
import weakref
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn

from hpctrain.model.boundary import Arrivals, pack, unpack
from hpctrain.model.meter import ActivationMeter

Named = namedtuple("Named", "a b")


@dataclasses.dataclass(frozen=True)
class Fields:
    a: torch.Tensor
    b: tuple = ()


def wants(tensor):
    return tensor.requires_grad


def passed_on(value):
    tensors, note = pack(value, wants)
    return unpack([tensor.detach().clone() for tensor in tensors], json.loads(json.dumps(note)))


X, N = torch.randn(2, 3), torch.arange(3)


@pytest.mark.parametrize(
    "value",
    [
        X,
        (X,),
        [X, (N, None)],
        {"x": X, "flags": [True, 3, 2.5, "text"]},
        OrderedDict(x=X, n=N),
        Named(X, {"n": N}),
        Fields(X, (N,)),
        (),
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_packed_comes_out_again(value):
    found = passed_on(value)
    assert type(found) is type(value) and repr(found) == repr(value)


def test_a_tensor_that_stands_twice_travels_once():
    tensors, _ = pack({"x": X, "again": (X, N)}, wants)
    assert len(tensors) == 2
    found = passed_on({"x": X, "again": (X, N)})
    assert found["x"] is found["again"][0]


@pytest.mark.parametrize(
    "value, words",
    [
        ({1.5: X, (2,): N}, "a dict with keys of tuple: give it text as keys"),
        ([X, object()], "object: only tensors, numbers and text"),
        ({X: 1}, "a dict with keys of Tensor"),
        (defaultdict(int, x=X), "defaultdict: only tensors"),
        (X.to_sparse(), "a tensor that is torch.sparse_coo torch.float32: make it dense"),
        ((N, X.to(torch.float8_e4m3fn)), "torch.float8_e4m3fn: make it dense, in a usual dtype"),
    ],
)
def test_what_cannot_travel_is_told(value, words):
    with pytest.raises(TypeError, match=words):
        pack(value, wants)


def test_a_class_inside_a_function_cannot_be_found_again():
    local = namedtuple("local", "a")
    local.__qualname__ = "f.<locals>.local"
    with pytest.raises(TypeError, match="local is defined inside a function"):
        pack(local(X), wants)


def test_arrivals_may_be_written_to_and_catch_their_gradients():
    sent = [torch.tensor([-1.0, 2.0]), torch.tensor([3.0]), torch.tensor([1])]
    tensors, note = pack([sent[0].clone().requires_grad_(), sent[1].clone().requires_grad_(), sent[2]], wants)
    assert note[1] == [True, True, False]
    arrivals = Arrivals(sent, note)
    x, unused, number = unpack(arrivals.tensors, note)
    assert x.data_ptr() == sent[0].data_ptr() and not sent[0].requires_grad
    y = nn.functional.relu(x, inplace=True) * number
    (3 * y.sum()).backward()
    assert torch.equal(arrivals.gradients[0], torch.tensor([0.0, 3.0]))
    assert arrivals.gradients[1:] == [None, None] and unused.requires_grad


def test_gradients_do_not_outlive_their_arrivals():
    sent = torch.tensor([-1.0, 2.0])
    arrivals = Arrivals([sent], pack(sent.clone().requires_grad_(), wants)[1])
    nn.functional.relu(arrivals.tensors[0], inplace=True).sum().backward()
    gradient = weakref.ref(arrivals.gradients[0])
    gc.disable()
    try:
        del arrivals
        assert gradient() is None
    finally:
        gc.enable()


def test_a_saved_tensor_that_is_written_to_is_told_while_the_meter_counts():
    w = torch.ones(3, requires_grad=True)
    with ActivationMeter(lambda: [w]).saving(0):
        h = w * 2
        y = (h * h).sum()
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
        y.backward()


def test_the_meter_counts_each_storage_once_and_no_weights():
    layer, meter_weights = nn.Linear(3, 5), []
    meter = ActivationMeter(lambda: [*layer.parameters(), *meter_weights])
    x = torch.randn(4, 3, requires_grad=True)
    with meter.saving(0):
        y = layer(x)
        z = y.sigmoid() * y.T.sum()
    held = x.nbytes + y.nbytes + 4  # the input, the sigmoid of its map, and the sum
    assert meter.peak == held
    meter.release(0)
    with meter.saving(1):
        z = layer(x) + z.detach().sum()
    assert meter.peak == held
    meter.active = False
    with meter.saving(2):
        torch.randn(1000, requires_grad=True).exp()
    assert meter.peak == held and z is not None
