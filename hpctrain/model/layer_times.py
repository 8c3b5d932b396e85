"""How long each layer of a model takes on this machine."""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.model.precision import Precision
from hpctrain.model.random_state import random_state_kept
from hpctrain.model.stage import Stage, build_stage
from hpctrain.model.structure import map_tensors, tensors_in


class LayerTime(NamedTuple):
    """Seconds of the forward and of the backward of one micro-batch."""

    forward: float
    backward: float


def measure(
    factories: Sequence[Callable[[], nn.Module]],
    inputs: Any,
    loss: Callable[[Any, Any], Any],
    targets: Any,
    seed: int,
    precision: Precision,
    repeats: int,
) -> list[LayerTime]:
    """The median over `repeats` (1 or more) of each layer alone, in training mode, after one run that does not count.

    A layer gets the outputs of the one before, and ones as the gradient of its own; the last layer's times are with
    `loss(outputs, targets)`, of which the first or only tensor is what is differentiated. The first layer's inputs get
    no gradient, as in training. No more than one layer is in memory, unless its factory keeps it.
    """
    times = []
    with random_state_kept():
        for index in range(len(factories)):
            stage = build_stage(factories, seed, precision, parts=[range(index, index + 1)])
            is_last = index == len(factories) - 1
            end = (lambda outputs: next(tensors_in(loss(outputs, targets)), None)) if is_last else (lambda same: same)
            _, outputs = _run(stage, _copied(inputs, index > 0), end)
            runs = [_run(stage, _copied(inputs, index > 0), end)[0] for _ in range(repeats)]
            times.append(LayerTime(*(median(column) for column in zip(*runs))))
            inputs = outputs
            for parameter in stage.named_parameters().values():
                parameter.grad = None
    return times


def _run(stage: Stage, inputs: Any, end: Callable[[Any], Any]) -> tuple[LayerTime, Any]:
    """Times of one forward and backward, and the outputs of the forward without their graph."""
    start = time.perf_counter()
    outputs = stage.forward(inputs, 0, 0)
    ends = _differentiable(tensors_in(end(outputs)))
    forward = time.perf_counter() - start
    ones = [torch.ones_like(tensor) for tensor in ends]
    start = time.perf_counter()
    if ends:
        torch.autograd.backward(ends, ones)
    return LayerTime(forward, time.perf_counter() - start), map_tensors(Tensor.detach, outputs)


def _differentiable(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _copied(value: Any, wants_gradient: bool) -> Any:
    """Copies of the tensors, which a layer may change in place; those that can have a gradient get one if wanted."""

    def copied(tensor: Tensor) -> Tensor:
        can_have_one = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(wants_gradient and can_have_one).clone()

    return map_tensors(copied, value)
