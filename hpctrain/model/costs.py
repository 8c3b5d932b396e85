"""What each layer of a model costs, by counting: the same on whatever machine, and every time."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.model.precision import Precision
from hpctrain.model.random_state import random_state_kept
from hpctrain.model.stage import Stage, build_stage
from hpctrain.model.structure import map_tensors, tensors_in


class LayerCost(NamedTuple):
    """Of one forward of a layer.

    `flops`: those of matrix products, convolutions, attention and recurrent layers, and one for each element of the
    outputs and of the parameters. `parameters`: their number. `outputs`: bytes of all output tensors.
    """

    flops: int
    parameters: int
    outputs: int


class Walk(NamedTuple):
    """`shared`: pairs of names, `layers.0.weight` and `layers.4.weight`, of a parameter that two layers have.

    The first name of a pair is that of the first layer that has it.
    """

    costs: list[LayerCost]
    shared: list[tuple[str, str]]


def walk(
    factories: Sequence[Callable[[], nn.Module]],
    inputs: Any,
    seed: int,
    precision: Precision,
    check: Callable[[nn.Module, str], nn.Module] = lambda layer, name: layer,
) -> Walk:
    """Builds one layer after the other, as build_stage does, and runs each once on the outputs of the one before.

    In evaluation mode and without a graph; no more than one layer is in memory, unless its factory keeps it. What a
    layer raises gets through. Without inputs (None) nothing runs, and parameters alone count.
    """
    found = Walk([], [])
    first_names: dict[int, tuple[weakref.ref, str]] = {}
    inputs = map_tensors(torch.clone, inputs)  # a layer may work in place
    with random_state_kept():
        for index in range(len(factories)):
            stage = build_stage(factories, seed, precision, check=check, parts=[range(index, index + 1)])
            found.shared.extend(_shared(stage, first_names))
            inputs, cost = _run(stage, inputs)
            found.costs.append(cost)
    return found


def _run(stage: Stage, inputs: Any) -> tuple[Any, LayerCost]:
    with stage.evaluating(), FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        outputs = stage.forward(inputs, 0, 0) if inputs is not None else None
    parameters = sum(parameter.numel() for parameter in stage.named_parameters().values())
    tensors = list(tensors_in(outputs))
    flops = counter.get_total_flops() + sum(tensor.numel() for tensor in tensors) + parameters
    return outputs, LayerCost(flops, parameters, sum(tensor.nbytes for tensor in tensors))


def _shared(stage: Stage, first_names: dict[int, tuple[weakref.ref, str]]) -> Iterator[tuple[str, str]]:
    """Pairs of the stage's parameters that a layer before it has too; adds the others to `first_names`."""
    for name, parameter in stage.named_parameters().items():
        reference, first = first_names.get(id(parameter), (lambda: None, name))
        if reference() is parameter:  # the id of one that is gone can come again
            yield first, name
        else:
            first_names[id(parameter)] = (weakref.ref(parameter), name)


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *others, **named) -> int:
    """Shapes (..., time, width): the products of queries with keys, and of the scores with values."""
    *batch, time, width = query
    return 2 * int(np.prod(batch)) * time * key[-2] * (width + value[-1])


def _recurrent(inputs: Sequence[int], to_gates: Sequence[int], back: Sequence[int], *others, **named) -> int:
    """Shapes (time, batch, width) and (gates, width): both products at each time step."""
    return 2 * inputs[0] * inputs[1] * (to_gates[0] * to_gates[1] + back[0] * back[1])


_FORMULAS = {  # of what FlopCounterMode does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
}
