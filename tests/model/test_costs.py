"""Costs are counted: the same every time, right where they can be counted by hand, and without a trace."""

import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.model.costs import LayerCost, walk
from hpctrain.model.layer_times import LayerTime, measure
from hpctrain.model.precision import Precision
from hpctrain.model.stage import build_stage
from hpctrain.tasks import convnet, gpt

FLOAT32 = Precision()


def random_states():
    return [torch.get_rng_state().tolist(), [str(each) for each in np.random.get_state()], random.getstate()]


class Keywords(nn.Module):
    """Takes a dict of tensors apart and returns one."""

    def forward(self, left, right):
        return {"left": left + right, "right": right.double()}


class Drawing(nn.Module):
    """Draws from all generators there are while it is built and while it runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3) + random.random() + float(np.random.rand()))

    def forward(self, x):
        return x + self.weight + torch.randn(3) + random.random() + float(np.random.rand())


def test_costs_of_a_linear_layer_and_a_convolution_are_those_of_the_textbook():
    factories = [lambda: nn.Conv2d(3, 8, 3, padding=1), nn.Flatten, lambda: nn.Linear(8 * 16, 5)]
    found = walk(factories, torch.zeros(2, 3, 4, 4), 0, FLOAT32)
    assert found.costs == [
        LayerCost(2 * 2 * 16 * 8 * 3 * 9 + 2 * 128 + 8 * 27 + 8, 8 * 27 + 8, 4 * 2 * 128),
        LayerCost(2 * 128, 0, 4 * 2 * 128),
        LayerCost(2 * 2 * 128 * 5 + 2 * 5 + 128 * 5 + 5, 128 * 5 + 5, 4 * 2 * 5),
    ]


@pytest.mark.parametrize("precision", ("float32", "float64", "bf16-mixed"))
def test_attention_counts(precision):
    batch, time, width = 2, 8, 16
    factories = gpt.layer_factories(2, width, 4, time, 0.1, 11)
    costs = walk(factories, torch.zeros(batch, time, dtype=torch.int64), 0, Precision(precision)).costs
    outputs = batch * time * width
    matrices, norms = 12 * width * width, 4 * width
    scores = 2 * 2 * batch * time * time * width
    assert costs[1].flops == costs[2].flops == 2 * batch * time * matrices + scores + outputs + matrices + norms
    assert costs[0].flops == outputs + costs[0].parameters and costs[0].parameters == (11 + time) * width
    assert costs[1].outputs == outputs * (8 if precision == "float64" else 4)


def test_a_recurrent_layer_counts():
    (cost,) = walk([lambda: nn.LSTM(4, 6, batch_first=True)], torch.zeros(2, 5, 4), 0, FLOAT32).costs
    outputs = 2 * 5 * 6 + 2 * 2 * 6
    assert cost.outputs == 4 * outputs
    assert cost.flops == 2 * 2 * 5 * 24 * (4 + 6) + outputs + cost.parameters


@pytest.mark.parametrize("shape", ((3, 9, 9), (1, 4, 6)))
def test_a_walk_is_the_same_every_time(shape):
    factories = convnet.layer_factories(shape, 10, 3, 8, 0.5)
    first, second = (walk(factories, torch.ones(2, *shape), seed, FLOAT32) for seed in (0, 1))
    assert first == second and first.shared == [] and len(first.costs) == 5


def test_layers_are_built_and_fed_as_in_a_stage():
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append((x, self.weight.detach().clone(), self.training, torch.is_grad_enabled()))
            return super().forward(x)

    factories, inputs = [lambda: Seen(3, 3), lambda: nn.Dropout(0.5), lambda: Seen(3, 2)], torch.ones(4, 3)
    names = []
    walk(factories, inputs, 7, FLOAT32, check=lambda layer, name: names.append(name) or layer)
    assert names == ["layers.0", "layers.1", "layers.2"]
    stage = build_stage(factories, 7, FLOAT32)
    with stage.evaluating():
        stage.forward(inputs, 0, 0)
    assert len(seen) == 4
    for (x, weight, training, grad), (y, other, *_) in zip(seen[:2], seen[2:]):
        assert torch.equal(x, y) and torch.equal(weight, other) and not training and not grad


def test_a_dict_goes_in_as_keyword_arguments_and_all_outputs_count():
    found = walk([Keywords, Keywords], {"left": torch.ones(3), "right": torch.ones(3)}, 0, FLOAT32)
    assert found.costs == [LayerCost(6, 0, 3 * 4 + 3 * 8), LayerCost(6, 0, 3 * 8 + 3 * 8)]


def test_layers_do_not_outlive_their_turn():
    alive = weakref.WeakSet()
    most = []

    def factory():
        layer = nn.Linear(2, 2)
        alive.add(layer.weight)
        most.append(len(alive))
        return layer

    assert walk([factory] * 6, torch.ones(1, 2), 0, FLOAT32).shared == []
    assert max(most) <= 2 and len(alive) == 0


def test_shared_parameters_are_found_by_identity():
    tensor, module = nn.Parameter(torch.ones(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))

    def around(bias):
        layer = nn.Linear(3, 3, bias=bias)
        layer.weight = tensor
        return layer

    factories = [lambda: around(False), lambda: module, nn.Tanh, lambda: around(True), lambda: module]
    factories.append(lambda: around(False))
    found = walk(factories, torch.ones(1, 3), 0, FLOAT32)
    assert found.shared == [
        ("layers.0.weight", "layers.3.weight"),
        ("layers.1.0.weight", "layers.4.0.weight"),
        ("layers.1.0.bias", "layers.4.0.bias"),
        ("layers.1.1.weight", "layers.4.1.weight"),
        ("layers.0.weight", "layers.5.weight"),
    ]
    assert module.training and all(each.training for each in module), "left as it was"


def test_what_is_shared_within_a_layer_is_no_pair():
    inner = nn.Linear(3, 3)
    assert walk([lambda: nn.Sequential(inner, inner)], torch.ones(1, 3), 0, FLOAT32).shared == []


def test_the_inputs_and_all_generators_are_as_they_were():
    inputs, before = -torch.ones(2, 3), random_states()
    walk([lambda: nn.ReLU(inplace=True), Drawing], inputs, 0, FLOAT32)
    measure([Drawing, lambda: nn.ReLU(inplace=True)], inputs, lambda y, _: (y.sum(), 2), None, 0, FLOAT32, 2)
    assert torch.equal(inputs, -torch.ones(2, 3)) and random_states() == before


def test_what_a_layer_raises_gets_through_and_leaves_no_trace():
    before = random_states()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        walk([Drawing, lambda: nn.Linear(4, 4)], torch.ones(2, 3), 0, FLOAT32)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        measure([Drawing, lambda: nn.Linear(4, 4)], torch.ones(2, 3), lambda y, _: y.sum(), None, 0, FLOAT32, 1)
    assert random_states() == before


def test_times_of_each_layer_are_measured_alone():
    events = []

    class Noted(nn.Linear):
        def forward(self, x):
            events.append((self.out_features, self.training, x.requires_grad))
            return super().forward(x)

    def loss(outputs, targets):
        events.append((tuple(outputs.shape), targets))
        return outputs.sum(), 4

    factories = [lambda: Noted(3, 5), lambda: Noted(5, 2)]
    times = measure(factories, torch.ones(4, 3), loss, "targets", 0, FLOAT32, 2)
    assert [type(time) for time in times] == [LayerTime, LayerTime]
    assert all(time.forward > 0 and time.backward > 0 for time in times)
    assert events == [(5, True, False)] * 3 + [(2, True, True), ((4, 2), "targets")] * 3


@pytest.mark.parametrize("precision", ("float32", "bf16-mixed"))
def test_times_of_integers_dicts_and_layers_without_a_gradient(precision):
    factories = gpt.layer_factories(1, 8, 2, 4, 0.1, 11)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    loss = gpt.cross_entropy_sum
    assert len(measure(factories, tokens, loss, tokens, 0, Precision(precision), 1)) == 3
    pair = {"left": torch.ones(3), "right": torch.ones(3)}
    (time,) = measure([Keywords], pair, lambda y, _: y["left"].sum(), None, 0, Precision(precision), 1)
    assert time.forward > 0


def test_measuring_leaves_no_gradient_on_a_module_of_the_callers():
    module = nn.Linear(3, 3)
    measure([lambda: module, lambda: module], torch.ones(2, 3), lambda y, _: y.sum(), None, 0, FLOAT32, 1)
    assert module.weight.grad is None and module.bias.grad is None
