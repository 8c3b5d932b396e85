"""Which device a rank takes, by facts that all ranks share: so all know of each other's choice, before any device call.

The rank in the world would be wrong from the second node on. What counts is the place among the ranks of a node, the
node being those that share memory, and there among those that see the same devices: a launcher may show each rank all
devices of a node, or only its own, which is number 0 to that rank alone.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

KINDS = ("auto", "cpu", "cuda")


class Sight(NamedTuple):
    """What a rank sees: `node` is the same on ranks that share memory, `no_device` why `devices` is empty."""

    host: str
    node: int
    devices: list[str]
    no_device: str | None
    torch_cuda: str | None  # the CUDA that its torch was built with
    has_cupy: bool


def settle(wish: str, workers: list[Sight], travels: bool) -> tuple[list[int | None], list[str]]:
    """By rank that trains, the number of its device, None on all for the host; and what is to be said of it.

    `wish` is one of KINDS, `auto`: devices where all have one. `travels`: whether gradients or activations do.
    ValueError, one line, where some ranks would have a device and others not, or where those asked for cannot be had.
    """
    if wish == "cpu":
        return [None] * len(workers), []
    hosts, visible = [each.host for each in workers], [each.devices for each in workers]
    chosen = choose_all([each.node for each in workers], visible)
    if line := disagreement(hosts, chosen):
        raise ValueError(f"--device {wish}: {line}; give each rank one, or train on --device cpu")
    lacking = next(filter(None, (_lack(rank, each, travels) for rank, each in enumerate(workers))), None)
    if lacking is None:
        return chosen, [f"{line}; they take turns on it" for line in shared(hosts, visible, chosen)]
    if wish == "cuda":
        raise ValueError(f"--device cuda: {lacking}; `python -m hpctrain doctor --require cuda` tells more")
    return [None] * len(workers), [f"--device auto: training is on the host, for {lacking}"] if visible[0] else []


def _lack(rank: int, sight: Sight, travels: bool) -> str | None:
    """Why a rank cannot train on a device."""
    if not sight.devices:
        return f"rank {rank} on {sight.host} has none: {sight.no_device}"
    if sight.torch_cuda is None:
        return f"rank {rank} on {sight.host} has a torch that is built without CUDA"
    if travels and not sight.has_cupy:
        return f"rank {rank} on {sight.host} has no CuPy, which adds on devices (pip install cupy-cuda12x, or yours)"
    return None


def choose(num_visible: int, local_rank: int) -> int | None:
    """The number, among those that it sees, of the device of a rank: round robin. None where it sees none."""
    return local_rank % num_visible if num_visible else None


def choose_all(nodes: list[int], visible: list[list[str]]) -> list[int | None]:
    """By rank, the number of its device; `nodes` that the ranks are on, `visible` the names of devices each sees."""
    before: Counter = Counter()
    chosen = []
    for place in zip(nodes, map(tuple, visible), strict=True):
        chosen.append(choose(len(place[1]), before[place]))
        before[place] += 1
    return chosen


def disagreement(hosts: list[str], chosen: list[int | None]) -> str | None:
    """A line where some ranks have a device and some have none; both by rank."""
    without = [rank for rank, device in enumerate(chosen) if device is None]
    having = [rank for rank, device in enumerate(chosen) if device is not None]
    if not without or not having:
        return None
    first, other = without[0], having[0]
    line = f"rank {first} on {hosts[first]} sees no CUDA device, rank {other} on {hosts[other]} does"
    return line + (f"; {len(without)} of {len(chosen)} ranks see none" if len(without) > 1 else "")


def shared(hosts: list[str], visible: list[list[str]], chosen: list[int | None]) -> list[str]:
    """A line for each device that several ranks have chosen; in `visible` no two devices have the same name."""
    takers: dict[str, list[int]] = {}
    for rank, device in enumerate(chosen):
        if device is not None:
            takers.setdefault(visible[rank][device], []).append(rank)
    return [
        f"{hosts[ranks[0]]}: ranks {', '.join(map(str, ranks))} share device {name}"
        for name, ranks in takers.items()
        if len(ranks) > 1
    ]
