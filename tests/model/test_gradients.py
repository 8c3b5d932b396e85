"""One arena, fixed buckets, and gradients that stay views of it whatever anybody does to them."""

import pytest
import torch
from torch import nn

from hpctrain.comm.buffer import allocate
from hpctrain.model.gradients import ALIGNMENT, FlatGradients
from hpctrain.model.stage import Stage


def model():
    torch.manual_seed(0)
    return Stage([nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)])


def flat(stage, bucket_bytes=1):
    return FlatGradients(stage.named_parameters(), allocate, bucket_bytes)


def backward(stage, rows=4):
    stage.forward(torch.ones(rows, 3), 0, 0).sum().backward()


def test_gradients_equal_those_of_plain_torch_and_add_up():
    stage, plain = model(), model()
    gradients = flat(stage)
    for _ in range(2):
        backward(stage)
        backward(plain)
    for name, parameter in plain.named_parameters().items():
        assert torch.equal(gradients.views[name], parameter.grad)
        assert stage.named_parameters()[name].grad.data_ptr() == gradients.views[name].data_ptr()


def test_buckets_hold_reversed_layers_and_every_parameter_once():
    stage = model()
    names = list(stage.named_parameters())
    for bucket_bytes in (1, 100, 150, 10**6):
        buckets = flat(stage, bucket_bytes).buckets
        assert [name for bucket in buckets for name in bucket.names] == names[::-1]
        for bucket in buckets[:-1]:
            assert bucket.flat.nbytes >= bucket_bytes
        for bucket in buckets:
            last = stage.named_parameters()[bucket.names[-1]]
            assert bucket.flat.nbytes - -(-last.nbytes // ALIGNMENT) * ALIGNMENT < bucket_bytes
            assert bucket.flat.data_ptr() % ALIGNMENT == 0
    assert len(flat(stage, 1).buckets) == len(names) and len(flat(stage, 10**6).buckets) == 1


def test_a_bucket_holds_one_dtype():
    stage = Stage([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2)])
    assert [bucket.flat.dtype for bucket in flat(stage, 10**6).buckets] == [torch.float32, torch.float64, torch.float32]


@pytest.mark.parametrize(
    "cut_off", (lambda p: setattr(p, "grad", None), lambda p: setattr(p, "grad", torch.zeros_like(p)))
)
def test_a_gradient_that_was_cut_off_comes_back_to_the_arena(cut_off):
    stage, plain = model(), model()
    gradients = flat(stage)
    backward(stage)
    for parameter in stage.named_parameters().values():
        cut_off(parameter)
    backward(stage)
    backward(plain)
    for name, parameter in plain.named_parameters().items():
        assert torch.equal(gradients.views[name], parameter.grad)
        assert stage.named_parameters()[name].grad.data_ptr() == gradients.views[name].data_ptr()


def test_buckets_are_reported_in_order_while_the_backward_runs_and_only_when_armed():
    stage = model()
    gradients = flat(stage)
    events = []
    gradients.on_ready = lambda number: events.append((number, sum(gradients.touched.values())))
    backward(stage)
    assert events == []
    gradients.zero()
    gradients.arm()
    backward(stage)
    assert [number for number, _ in events] == list(range(6))
    assert events[0][1] <= 2 and events[-1][1] == 6, "the first bucket did not wait for the last layer's backward"
    gradients.flush()
    assert len(events) == 6


def test_flush_reports_what_no_backward_completed():
    stage = model()
    gradients = flat(stage)
    events = []
    gradients.on_ready = events.append
    gradients.flush()
    assert events == list(range(6)), "nobody armed: all are due"
    events.clear()
    gradients.zero()
    gradients.arm()
    stage.layers[2](torch.ones(1, 5)).sum().backward()
    assert events == [0, 1], "the last layer's two"
    gradients.flush()
    assert events == list(range(6))
    assert not gradients.touched["layers.0.weight"] and gradients.touched["layers.2.bias"]
    assert not gradients.views["layers.0.weight"].any()


def test_frozen_parameters_have_no_place_and_shared_ones_have_one():
    shared = nn.Linear(4, 4)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    stage = Stage([shared, frozen, shared])
    gradients = flat(stage)
    assert sorted(gradients.parameters) == ["layers.0.bias", "layers.0.weight"]
    stage.forward(torch.ones(1, 4), 0, 0).sum().backward()
    assert gradients.touched == {"layers.0.bias": True, "layers.0.weight": True}


def test_a_parameter_without_elements_is_carried_along():
    empty = nn.Module()
    empty.nothing = nn.Parameter(torch.empty(0))
    empty.something = nn.Parameter(torch.ones(2))
    gradients = FlatGradients({"nothing": empty.nothing, "something": empty.something}, allocate, 1)
    (empty.nothing.sum() + empty.something.sum()).backward()
    assert gradients.views["something"].tolist() == [1, 1] and gradients.views["nothing"].shape == (0,)
    gradients.scale(0.5)
    assert gradients.views["something"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_what_is_not_finite_is_named(value):
    stage = model()
    gradients = flat(stage, 10**6)
    backward(stage)
    assert gradients.not_finite(gradients.buckets[0]) is None
    gradients.views["layers.1.bias"][3] = value
    assert gradients.not_finite(gradients.buckets[0]) == "layers.1.bias"


def test_large_finite_gradients_are_finite_though_their_sum_is_not():
    stage = model()
    gradients = flat(stage, 10**6)
    gradients.views["layers.1.weight"].fill_(3e38)
    assert gradients.not_finite(gradients.buckets[0]) is None


def test_a_parameter_that_was_cut_off_and_not_used_since_has_gradient_zero():
    stage = model()
    gradients = flat(stage)
    backward(stage)
    stage.named_parameters()["layers.0.weight"].grad = None
    gradients.flush()
    assert not gradients.views["layers.0.weight"].any() and not gradients.touched["layers.0.weight"]
    assert gradients.views["layers.1.weight"].any() and gradients.touched["layers.1.weight"]


def test_a_second_gradient_in_one_backward_is_refused_by_name():
    """As reentrant checkpointing of a shared layer makes it: the first one may have been sent already."""
    stage = model()
    flat(stage).arm()
    stage.layers[2](torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="layers.2.bias got a second gradient in one backward|layers.2.weight got"):
        stage.layers[2](torch.ones(1, 5)).sum().backward()


SWAPS = {
    "grad.data": lambda p: setattr(p.grad, "data", p.grad.data * 1),
    "share_memory": lambda p: p.grad.share_memory_(),
    "transposed": lambda p: setattr(p, "grad", p.grad.t()),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("swap", SWAPS)
def test_a_storage_that_torch_swaps_does_not_take_the_arena_along(swap):
    stage = Stage([nn.Linear(5, 5, bias=False)])
    gradients = flat(stage)
    (parameter,) = stage.named_parameters().values()
    inputs = torch.arange(10.0).view(2, 5)
    stage.layers[0](inputs).sum().backward()
    SWAPS[swap](parameter)
    expected = parameter.grad.clone()
    stage.layers[0](inputs).sum().backward()
    expected += inputs.sum(0)
    assert torch.equal(parameter.grad, expected) and gradients.is_attached("layers.0.weight")
    assert torch.equal(gradients.buckets[0].flat[:25].view(5, 5), expected)
