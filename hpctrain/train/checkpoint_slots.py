"""What optimizers keep of parameters and of rows, as pieces of a checkpoint, whoever holds which part of them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from hpctrain.train.checkpoint_files import CheckpointError
from hpctrain.train.checkpoint_pieces import Piece

SLOTS: dict[type, set[str]] = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Adagrad: {"step", "sum"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
}  # names of what torch's optimizers keep of a parameter
Slots = Mapping[str, Mapping[str, str]]  # by parameter and slot: the key


def slot_pieces(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, start: int, whole: Sequence[int]
) -> Iterator[Piece]:
    """Of `parameter`, which is the numbers of `name` from `start` on; that one's shape is `whole`."""
    for slot, value in optimizer.state.get(parameter, {}).items():
        key = f"optimizer/{name}/{slot}"
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() == 0 and parameter.dim() != 0:
            if start == 0:
                yield Piece.whole(key, value)
        else:
            yield Piece(key, tuple(whole), start, value)


def num_kept(optimizer: torch.optim.Optimizer) -> int:
    """Numbers that it keeps of each one of a parameter."""
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]:
        return 0
    return len(SLOTS[type(optimizer)] - {"step"})


def slots_of(tensors: Mapping[str, torch.Tensor]) -> Slots:
    """What a checkpoint has of optimizers."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for key in tensors:
        if key.startswith("optimizer/"):
            name, _, slot = key.removeprefix("optimizer/").rpartition("/")
            found[name][slot] = key
    return found


def state_of(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    slots: Slots,
    name: str,
    parameter: nn.Parameter,
    start: int,
    whole: Sequence[int],
) -> dict[str, torch.Tensor]:
    """The state for `parameter`, as `slot_pieces` has it; as it begins where nobody had stepped it. CheckpointError."""
    found = {}
    for slot, key in slots.get(name, {}).items():
        value = tensors[key]
        if not (value.dtype.is_floating_point if slot == "step" else value.dtype == parameter.dtype):
            raise CheckpointError(f"{key} is {value.dtype}, and the parameter is {parameter.dtype}")
        if tuple(value.shape) == tuple(whole):
            flat = value.reshape(-1)[start : start + parameter.numel()]
            value = flat.reshape(parameter.shape).to("cpu" if slot == "step" else parameter.device, copy=True)
        elif value.dim():
            raise CheckpointError(f"{key} of shape {list(value.shape)} does not fit one of {list(whole)}")
        found[slot] = value
    if found and found.keys() != SLOTS[type(optimizer)]:
        raise CheckpointError(
            f"optimizer/{name} has {', '.join(found)}, which {type(optimizer).__name__} does not keep"
        )
    if not found and isinstance(optimizer, torch.optim.Adagrad):  # which has sums from the start
        return {"step": torch.zeros(()), "sum": torch.zeros_like(parameter)}
    return found


def rows_of(
    tensors: Mapping[str, torch.Tensor], table: str, owner: int = 0, num_owners: int = 1
) -> dict[str, torch.Tensor]:
    """The state of the rows of a table whose ids leave remainder `owner`, whoever held them when it was saved.
    CheckpointError where it is not one of as many rows as ids.
    """
    shards: dict[str, dict[str, str]] = defaultdict(dict)
    for key in tensors:
        if key.startswith(f"tables/{table}/"):
            holder, _, slot = key.removeprefix(f"tables/{table}/").partition("/")
            shards[holder][slot] = key
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for names in shards.values():
        found = {slot: tensors[key] for slot, key in names.items()}
        ids = found.get("ids")
        if ids is None or ids.dtype != torch.int64 or any(each.shape[:1] != ids.shape for each in found.values()):
            raise CheckpointError(f"tables/{table} has not a row of everything for each of its ids")
        own = ids % num_owners == owner
        for slot, values in found.items():
            parts[slot].append(values[own])
    if any(each[0].shape[1:] != piece.shape[1:] for each in parts.values() for piece in each):
        raise CheckpointError(f"tables/{table} has rows of several widths")
    return {slot: torch.cat(pieces) for slot, pieces in parts.items()}
