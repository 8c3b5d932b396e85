"""Batches and outputs as models have them: a tensor, or dicts, lists and tuples of them."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with each tensor replaced by function(tensor); its containers are copied, everything else stays."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        new = copy.copy(value)
        for key, each in value.items():
            new[key] = map_tensors(function, each)
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(new, field.name, map_tensors(function, getattr(value, field.name)))  # also a frozen one
        return new
    return value


def tensors_in(value) -> Iterator[torch.Tensor]:
    """All tensors in what a model takes or returns: alone, or in tuples, lists, dictionaries and data classes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)


def to_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`; integers stay what they are."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
