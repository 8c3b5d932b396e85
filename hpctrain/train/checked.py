"""What a task of the user's own returns, checked where it comes in: a mistake is one line that names the member.

A wrong shape would otherwise end in the middle of our own code, or train silently on something else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.comm.abort import RankFailed
from hpctrain.train.errors import AgreedError

LOSS = "it should give (the sum over the items as a scalar tensor, the number of items)"
METRIC = "it should give {name: (sum over the items, number of items)}"


def checked_row(row: Any, number: int) -> tuple[Any, Any]:
    """A row of a data set: a pair."""
    if not isinstance(row, (tuple, list)) or len(row) != 2:
        what = f"{len(row)} values" if isinstance(row, (tuple, list)) else f"a {type(row).__name__}"
        raise RankFailed(f"--task: row {number} of dataset() is {what}; a row is (input, target)")
    return tuple(row)


def checked_loss(result: Any) -> tuple[torch.Tensor, float]:
    """What loss() gave: a scalar tensor, and a weight that is a whole number in most tasks."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise RankFailed(f"--task: loss() gave {described(result)}; {LOSS}")
    loss, items = result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise RankFailed(f"--task: loss() gave {described(loss)} as the sum; {LOSS}")
    return loss.reshape(()), checked_count(items, f"loss() gave {described(items)} as the number of items; {LOSS}")


def checked_metric(result: Any) -> dict[str, tuple[float, float]]:
    """What metric() gave: sums and counts by name."""
    if not isinstance(result, Mapping):
        raise RankFailed(f"--task: metric() gave {described(result)}; {METRIC}")
    checked = {}
    for name, pair in result.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RankFailed(f"--task: metric() gave {described(pair)} as {name}; {METRIC}")
        count = checked_count(pair[1], f"metric() gave {described(pair[1])} as the count of {name}; {METRIC}")
        checked[str(name)] = (as_number(pair[0], f"metric() gave {described(pair[0])} as {name}; {METRIC}"), count)
    return checked


def checked_baseline(result: Any) -> dict[str, float]:
    """What baseline() gave: numbers by the names of metrics. ValueError, since the run itself is whole."""
    if not isinstance(result, Mapping):
        raise ValueError(f"baseline() gave {described(result)}; it should give {{name of a metric: value}}")
    return {str(name): float(value) for name, value in result.items()}


def checked_figures(result: Any) -> dict[str, float]:
    """What figures() made of the means: numbers by name."""
    if not isinstance(result, Mapping):
        raise RankFailed(f"--task: figures() gave {described(result)}; it should give {{name: number}}")
    return {
        str(name): as_number(value, f"figures() gave {described(value)} as {name}") for name, value in result.items()
    }


def checked_count(value: Any, fault: str) -> float:
    """A number of items, from 0 up; a fraction where the task weighs its items."""
    count = as_number(value, fault)
    if not (count >= 0 and math.isfinite(count)):
        raise RankFailed(f"--task: {fault}")
    return int(count) if count == int(count) else count


def as_number(value: Any, fault: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, complex) or not hasattr(value, "__float__") or isinstance(value, torch.Tensor):
        raise RankFailed(f"--task: {fault}")
    return float(value)


def checked_factories(result: Any, member: str) -> Sequence[Callable[[], nn.Module]]:
    """What layers() gave. AgreedError on every rank alike."""
    listed = isinstance(result, (list, tuple)) and len(result) > 0
    if not listed or not all(callable(each) and not isinstance(each, nn.Module) for each in result):
        wrong = next((each for each in result if isinstance(each, nn.Module)), result) if listed else result
        raise AgreedError(
            f"--task: {member} gave {described(wrong)}; it should give a list of functions that each build one layer,"
            " such as lambda: torch.nn.Linear(8, 8)"
        )
    return result


def checked_layer(layer: Any, name: str) -> nn.Module:
    """A layer that a factory built, with all its shapes. AgreedError on every rank alike."""
    if not isinstance(layer, nn.Module):
        raise AgreedError(f"--task: {name} is {described(layer)}; it should be a torch.nn.Module")
    for inside, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if is_lazy(tensor):
            raise AgreedError(f"--task: {name}.{inside} has no shape yet; give the layer its sizes")
        if tensor.is_complex() and tensor.requires_grad:
            raise AgreedError(f"--task: {name}.{inside} is complex; train torch.view_as_real of it, a real parameter")
    return layer


def described(value: Any) -> str:
    """In words: `a tensor of shape [3]`, `None`, `a float`."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"
