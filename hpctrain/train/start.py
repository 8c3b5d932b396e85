"""Ranks start equal, and are found to be equal at the end.

Layers are built from seeds, so replicas should agree anyway; a user's layer may draw from somewhere else. So rank 0's
parameters, buffers and frozen tensors replace everybody's before step 1.
"""

from collections.abc import Iterable, Mapping

import torch

from hpctrain.comm.group import Group
from hpctrain.model.stage import Stage
from hpctrain.train.errors import AgreedError


def start_equal(stage: Stage, replicas: Group) -> None:
    """Gives all replicas the tensors of the first. AgreedError where they built different models. Collective."""
    share_first({**stage.named_parameters(), **stage.named_buffers()}, replicas)


def share_first(tensors: Mapping[str, torch.Tensor], replicas: Group, also: Iterable[str] = ()) -> None:
    """Gives all replicas the `tensors` of the first. AgreedError where names, types, shapes or the lines `also` differ.

    Collective.
    """
    described = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()]
    described += also
    raise_where_different(replicas, described, "built a different model")
    with torch.no_grad():
        for name, tensor in tensors.items():
            _share(name, tensor, replicas)


def _share(name: str, tensor: torch.Tensor, replicas: Group) -> None:
    if tensor.layout != torch.strided:
        raise AgreedError(f"{name} is {tensor.layout} and cannot travel; keep it dense, or out of the model's buffers")
    same = tensor.cpu().contiguous()
    replicas.broadcast(same.reshape(-1).view(torch.uint8))  # as bytes: also what NumPy has no name for
    if not torch.equal(same.reshape(-1).view(torch.uint8), tensor.cpu().contiguous().reshape(-1).view(torch.uint8)):
        tensor.copy_(same)


def raise_where_different(group: Group, lines: list[str], fault: str, member: str = "replica") -> None:
    """AgreedError on all ranks of `group`, with the first line in which one differs from the first. Collective.

    `member` is what the message calls them.
    """
    everybody = group.all_gather_json(lines)
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            pairs = zip(everybody[0] + ["nothing more"], theirs + ["nothing more"])
            first = next(f"{a!r} on {member} 0, {b!r} on {member} {rank}" for a, b in pairs if a != b)
            raise AgreedError(f"{member} {rank} {fault}: {first}")
