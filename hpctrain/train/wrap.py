"""What a model must be to train on many ranks, said before the first step, and the tensors in what it returns."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def check_trainable(module: nn.Module) -> None:
    """ValueError, one line with the name, for a model whose gradients cannot travel."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"DataParallel: {type(module).__name__} is no torch.nn.Module")
    named = dict(module.named_parameters())
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(f"DataParallel: no parameter of {type(module).__name__} requires a gradient; use it as it is")
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(f"DataParallel: {name} has no shape yet; run one forward before wrapping the model")
        if parameter.device.type != "cpu":
            raise ValueError(f"DataParallel: {name} is on {parameter.device}; only CPU tensors travel: model.cpu()")
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            refuse_sparse(f"{name}.weight".lstrip("."))


def refuse_sparse(name: str) -> None:
    raise ValueError(f"DataParallel: the gradient of {name} is sparse and cannot travel; use sparse=False")


def warn_of_mixed_rows(names: list[str]) -> None:
    """Layers of batch normalisation see the rows of one rank only."""
    print(
        f"hpctrain: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: batch statistics are those of "
        "each rank's own rows; call average_statistics() before you evaluate or save",
        file=sys.stderr,
    )


def tensors_in(value) -> Iterator[torch.Tensor]:
    """All tensors in what a forward returned: alone, or in tuples, lists, dictionaries and data classes."""
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
