"""How the ranks of a ring come to the memory that they share."""

import sys
from typing import Any

import numpy as np

from hpctrain.comm import windows
from hpctrain.comm.buffer import allocate
from hpctrain.comm.node import STAGE_BYTES, Node
from hpctrain.comm.ring import Ring
from hpctrain.comm.shared_memory import has_room, name_of_node
from hpctrain.plan.allreduce import nodes_of


def join_node(ring: Ring, stage_bytes: int = STAGE_BYTES, num_rings: int = 1) -> None:
    """Gives the ring its node, where ranks share one, equally many on each, and there is room. Collective.

    `num_rings`: how many do so at a time, this one included.
    """
    if ring.size == 1:
        return
    names = np.zeros(ring.size, np.int64)
    names[ring.rank] = name_of_node()
    ring.one_shot(names, "nodes").start().wait()
    nodes = nodes_of(names.tolist())
    ring.spans_nodes, ring.node_sizes, per_node = len(nodes) > 1, [len(node) for node in nodes], len(nodes[0])
    if per_node == 1 or any(len(node) != per_node for node in nodes):
        return
    if not has_room(ring, Node.bytes_needed(per_node, stage_bytes), num_rings):
        return
    ring.agree("windows")
    number = next(number for number, node in enumerate(nodes) if ring.rank in node)
    comm, across = _split(ring, nodes, number) if ring.spans_nodes else (ring.comm, None)
    ring.node = _built(ring, comm, nodes[number], across, stage_bytes, num_rings)
    if ring.node is None and across is not None:
        across.close()
    # before anybody writes there, owners have cleared it; nobody hears here of what others call next
    ring.progress.wait(ring.comm.Ibarrier().Test)


def _split(ring: Ring, nodes: list[list[int]], number: int) -> tuple[Any, Ring]:
    """The ranks of this one's node, and a ring of its counterparts on all nodes."""
    place = nodes[number].index(ring.rank)
    across = Ring(ring.comm.Split(place, number), names=[node[place] for node in nodes])
    across.counters = ring.counters  # what it sends, the ring sends
    return ring.comm.Split(number, place), across


def _built(ring: Ring, *arguments) -> Node | None:
    """None on all ranks where MPI gives one of them no shared memory."""
    from mpi4py import MPI

    node, failed, before = None, np.zeros(1, np.int32), windows.num_open()
    try:
        node = Node(ring, *arguments)
    except MPI.Exception as error:
        failed[0] = 1
        print(f"hpctrain: rank {ring.rank}: MPI gives no shared memory, sums are slower: {error}", file=sys.stderr)
    ring.one_shot(failed, "shared memory").start().wait()
    if not failed[0]:
        return node
    windows.forget(before)
    return None


def allocate_shared(ring: Ring, nbytes: int) -> np.ndarray:
    """Memory as buffer.allocate gives it; shared, where the ranks share a node and there is room. Collective."""
    memory = ring.node.allocate(nbytes) if ring.node is not None else None
    return allocate(nbytes) if memory is None else memory
