"""What a model must be to train on many ranks, said before the first step."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.comm import buffer


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
    the_device(named, "DataParallel")
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            refuse_sparse(f"{name}.weight".lstrip("."))


def the_device(parameters: Mapping[str, nn.Parameter], user: str) -> torch.device:
    """On which all are, the host where there are none. ValueError that begins with `user` where they cannot travel."""
    found = {each.device: name for name, each in reversed(parameters.items())}
    if odd := next((each for each in found if each.type not in ("cpu", *buffer.DEVICE_KINDS)), None):
        raise ValueError(f"{user}: {found[odd]} is on {odd}; tensors of host and CUDA devices travel: model.cpu()")
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise ValueError(f"{user}: {first} is on {one} and {second} on {other}; put the model on one device")
    return next(iter(found), torch.device("cpu"))


def check_compressible(parameters: Mapping[str, nn.Parameter], flag: str, compress: Any) -> None:
    """ValueError that begins with `flag` for one whose gradient cannot be compressed so."""
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu" and compress != "bf16":
            raise ValueError(
                f"{flag}: {name} is on {parameter.device}, where only bf16 compresses; or train on the host"
            )
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(f"{flag}: {name} is {dtype}; only gradients of float32 and float64 are compressed")


def check_unchanged(
    module: nn.Module, wrapped: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]
) -> None:
    """ValueError, one line with the name, for what requires a gradient and is not among the `trained`."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and trained.get(name) is not parameter:
            if wrapped.get(name) is parameter:
                raise ValueError(
                    f"DataParallel: {name} required no gradient when the model was wrapped; wrap, then freeze"
                )
            raise ValueError(f"DataParallel: {name} was put there after wrapping; change the model, then wrap it")


def refuse_sparse(name: str) -> None:
    raise ValueError(f"DataParallel: the gradient of {name} is sparse and cannot travel; use sparse=False")


def warn_of_mixed_rows(names: list[str]) -> None:
    """Layers of batch normalisation see the rows of one rank only."""
    print(
        f"hpctrain: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: batch statistics are those of "
        "each rank's own rows; call average_statistics() before you evaluate or save",
        file=sys.stderr,
    )
