"""On which device each rank trains: agreed on before torch is loaded, taken before anything is computed."""

import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.comm.devices import has_cupy, torch_cuda, visible_devices
from hpctrain.comm.group import Group
from hpctrain.config import Config
from hpctrain.plan.devices import Sight, settle
from hpctrain.train.errors import AgreedError

if TYPE_CHECKING:
    import torch


def choose(config: Config, world: Group) -> tuple[Config, int | None]:
    """The settings with what `--device` comes to, and the number of this rank's device, None for the host.

    AgreedError where it cannot be had. Collective, also with servers, which are the last ranks and take none.
    """
    num_workers = world.size - config.servers
    if config.device == "cpu":
        return config, None
    own = look(world) if world.rank < num_workers else None
    workers = [Sight(*each) for each in world.all_gather_json(own)[:num_workers]]
    try:
        chosen, notes = settle(config.device, workers, travels=world.size > 1)
    except ValueError as error:
        raise AgreedError(str(error)) from None
    for note in notes if world.rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    device = "cpu" if chosen[0] is None else "cuda"
    return replace(config, device=device), chosen[world.rank] if world.rank < num_workers else None


def look(world: Group) -> Sight:
    """What this rank sees."""
    node = 0
    if world.comm is not None:
        from hpctrain.comm.shared_memory import name_of_node

        node = name_of_node()
    return Sight(socket.gethostname(), node, *visible_devices(), torch_cuda(), has_cupy())


def take(number: int | None) -> "torch.device":
    """The device that this process computes on from now on.

    Convolutions in float32 are that: cuDNN would round what they multiply to TF32. And a backward runs in the thread
    that calls it, not in one that torch has for the device: hooks call MPI, which may not allow two threads to.
    """
    import torch

    if number is None:
        return torch.device("cpu")
    torch.cuda.set_device(number)
    torch.backends.cudnn.allow_tf32 = False
    torch.autograd.set_multithreading_enabled(False)
    return torch.device("cuda", number)


def numbered(device: "torch.device | str") -> "torch.device":
    """`device` as tensors on it say it: `cuda` alone is the current one."""
    import torch

    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
