"""What crosses the border between two stages: any structure of tensors, as a list of them and a note in JSON.

The note says how the tensors hang together (tuples, lists, dicts, data classes, None, numbers, text) and which of them
want a gradient. On the other side they arrive as the outputs of an operation of their own: a layer may write to them in
place, as in one process, and their gradient is caught where it would have flowed on.
"""

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

PLAIN = (type(None), bool, int, float, str)
DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


def pack(value: Any, wants: Callable[[torch.Tensor], bool]) -> tuple[list[torch.Tensor], Any]:
    """The tensors in `value`, each once, and the note that `unpack` needs. TypeError for what cannot travel.

    `wants(tensor)` tells whether it wants a gradient.
    """
    tensors: list[torch.Tensor] = []
    note = _describe(value, tensors, {})
    return tensors, [note, [wants(tensor) for tensor in tensors]]


def _describe(value: Any, tensors: list[torch.Tensor], places: dict[int, int]) -> list:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.dtype not in DTYPES:
            raise TypeError(f"a tensor that is {value.layout} {value.dtype}: make it dense, in a usual dtype")
        if id(value) not in places:
            places[id(value)] = len(tensors)
            tensors.append(value)
        return ["tensor", places[id(value)]]
    if type(value) in PLAIN:
        return ["plain", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(each, tensors, places) for each in value]]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return ["named", *_class_of(value), _items(value._asdict(), tensors, places)]
    if type(value) in (dict, OrderedDict) or (isinstance(value, Mapping) and dataclasses.is_dataclass(value)):
        return ["mapping", *_class_of(value), _items(value, tensors, places)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["fields", *_class_of(value), _items(fields, tensors, places)]
    raise TypeError(f"{type(value).__name__}: only tensors, numbers and text in tuples, lists and dicts can travel")


def _items(mapping: Mapping, tensors: list[torch.Tensor], places: dict[int, int]) -> list:
    for key in mapping:
        if type(key) not in PLAIN:
            raise TypeError(f"a dict with keys of {type(key).__name__}: give it text as keys")
    return [[key, _describe(each, tensors, places)] for key, each in mapping.items()]


def _class_of(value: Any) -> tuple[str, str]:
    kind = type(value)
    if "<locals>" in kind.__qualname__:
        raise TypeError(f"{kind.__name__} is defined inside a function: move it to the module's own level")
    return kind.__module__, kind.__qualname__


def unpack(tensors: list[torch.Tensor], note: Any) -> Any:
    """The structure again, with these tensors in it."""
    return _rebuild(tensors, note[0])


def _rebuild(tensors: list[torch.Tensor], note: list) -> Any:
    kind, *rest = note
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "plain":
        return rest[0]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_rebuild(tensors, each) for each in rest[0])
    module, name, items = rest
    pairs = {key: _rebuild(tensors, each) for key, each in items}
    made = _find(module, name)
    if kind == "mapping":
        return made(**pairs) if dataclasses.is_dataclass(made) else made(pairs)
    if kind == "named":
        return made(**pairs)
    value = made.__new__(made)
    for key, each in pairs.items():
        object.__setattr__(value, key, each)
    return value


def _find(module: str, name: str) -> type:
    found: Any = sys.modules.get(module) or import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class Arrivals:
    """Tensors from the stage before, as inputs of this one. `gradients` holds what a backward brings them, or None.

    `tensors` has those in it that want a gradient as non-leaves, on the memory of those that came.
    """

    def __init__(self, tensors: list[torch.Tensor], note: Any):
        self.gradients: list[torch.Tensor | None] = [None] * len(tensors)
        anchor = torch.zeros((), requires_grad=True)
        self.tensors = [
            _Arrive.apply(anchor, self.gradients, place, tensor.data) if wants else tensor
            for place, (tensor, wants) in enumerate(zip(tensors, note[1]))
        ]


class _Arrive(torch.autograd.Function):
    """The beginning of a stage's graph. An input that was written to is no leaf, and may be written to again."""

    @staticmethod
    def forward(ctx, anchor, gradients, place, tensor):
        ctx.gradients, ctx.place = gradients, place  # the list alone: the arrivals themselves would be a cycle
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        ctx.gradients[ctx.place] = gradient
        return None, None, None, None
