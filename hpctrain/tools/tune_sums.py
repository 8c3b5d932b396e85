"""Seconds of an all-reduce by each algorithm that these ranks can use, in turns: what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from hpctrain.comm.allreduce import all_reduce
from hpctrain.comm.buffer import allocate
from hpctrain.comm.doubling import Doubling
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.ring import Ring
from hpctrain.plan.allreduce import Constants
from hpctrain.plan.fit import measured_constants

Table = dict[str, dict[int, float]]  # seconds by algorithm and bytes
RING, DOUBLING, WINDOWS, STAGED = "ring", "doubling", "windows", "staged"
BETWEEN = ("nodes ring", "nodes doubling")  # of one rank of each node, between which the sums of nodes travel
SECONDS = 0.05  # that the calls of a block take, about
MOST_CALLS = 50


def measured_sums(mesh: Mesh, sizes: Sequence[int], rounds: int) -> Table:
    """Over the replicas: medians, over so many rounds, of what the rank that took longest needed. Collective.

    `windows` are of arrays in memory that the ranks of a node share, `staged` and all others of arrays that lie
    elsewhere. What the ranks of one stage cannot use is left out for all.
    """
    memory = mesh.data.allocate(max(sizes)), allocate(max(sizes))
    for each in memory:
        each[:] = 0  # sums of zeros neither grow nor round
    table: Table = {}
    names: list[str] = []
    for nbytes in sizes:
        window, elsewhere = (each[:nbytes].view(np.float32) for each in memory)
        ways = ways_of(mesh.data.ring, window, elsewhere)
        names = names or common(mesh.world.all_gather_json(list(ways)))
        operations = {name: ways[name]() for name in names}
        for name, seconds in rounds_of(mesh, {name: each.run for name, each in operations.items()}, rounds).items():
            table.setdefault(name, {})[nbytes] = seconds
        for each in operations.values():
            each.release()
    return table


def ways_of(ring: Ring, window: np.ndarray, elsewhere: np.ndarray) -> dict[str, Callable]:
    """By name, what prepares a sum of these arrays over the ring; the same on all its ranks, not on other stages."""
    node, name = ring.node, "tune"
    found = {
        RING: partial(ring.all_reduce, elsewhere, name),
        DOUBLING: partial(Doubling, ring, elsewhere, name),
    }
    if node is None:
        return found
    if node.locate(window) is not None:
        found[WINDOWS] = partial(all_reduce, ring, window, name, "windows")
    found[STAGED] = partial(all_reduce, ring, elsewhere, name, "windows")
    if node.across is not None:
        by_messages = partial(node.across.all_reduce, elsewhere, name), partial(Doubling, node.across, elsewhere, name)
        found |= zip(BETWEEN, by_messages)
    return found


def common(names: list[list[str]]) -> list[str]:
    """Of the names of each rank those that all have."""
    return [name for name in names[0] if all(name in each for each in names)]


def rounds_of(mesh: Mesh, calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of one call of each, the slowest rank's; every other round in reverse order. Collective."""
    for call in calls.values():
        call()  # what is made in a first call, and the way into the caches
    own: dict[str, list[float]] = {name: [] for name in calls}
    num_calls = max(1, min(MOST_CALLS, int(SECONDS / once)) if (once := _once(mesh, calls)) else MOST_CALLS)
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else reversed(calls):
            mesh.barrier()
            began = time.perf_counter()
            for _ in range(num_calls):
                calls[name]()
            own[name].append((time.perf_counter() - began) / num_calls)
    return slowest(mesh, own)


def slowest(mesh: Mesh, own: dict) -> dict:
    """Of each rank's seconds by name and round the median over the rounds of the longest. Collective."""
    everybody = mesh.world.all_gather_json(list(own.values()))
    return {
        name: max(statistics.median(map(max, zip(*(each[place] for each in everybody)))), 1e-9)
        for place, name in enumerate(own)
    }


def _once(mesh: Mesh, calls: dict[str, Callable[[], None]]) -> float:
    """Seconds of a call of the slowest of all, the same on all ranks. Collective."""
    longest = 0.0
    for call in calls.values():
        mesh.barrier()
        began = time.perf_counter()
        call()
        longest = max(longest, time.perf_counter() - began)
    return max(mesh.world.all_gather_json(longest))


def constants_from(table: Table, mesh: Mesh) -> Constants:
    """By the times that `measured_sums` gave on this mesh: as rank 0 finds them, whose stage has its own nodes.

    Collective.
    """
    ring = mesh.data.ring
    between = None
    if BETWEEN[0] in table:
        between = table[BETWEEN[0]], table[BETWEEN[1]], ring.node.across.size
    staged = table.get(STAGED)
    found = measured_constants(table[RING], table[DOUBLING], ring.size, staged, between, ring.spans_nodes)
    return Constants(**mesh.world.broadcast_json(asdict(found)))
