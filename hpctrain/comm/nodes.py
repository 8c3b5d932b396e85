"""How the ranks of a ring come to the memory that they share."""

import numpy as np

from hpctrain.comm.buffer import allocate
from hpctrain.comm.node import STAGE_BYTES, Node
from hpctrain.comm.ring import Ring
from hpctrain.comm.shared_memory import has_room, name_of_node
from hpctrain.plan.allreduce import nodes_of


def join_node(ring: Ring, stage_bytes: int = STAGE_BYTES) -> None:
    """Gives the ring its node, where ranks share one, equally many on each, and there is room. Collective."""
    if ring.size == 1:
        return
    names = np.zeros(ring.size, np.int64)
    names[ring.rank] = name_of_node()
    ring.one_shot(names, "nodes").start().wait()
    nodes = nodes_of(names.tolist())
    per_node = len(nodes[0])
    if per_node == 1 or any(len(node) != per_node for node in nodes):
        return
    if not has_room(ring, Node.bytes_needed(per_node, stage_bytes)):
        return
    ring.agree("windows")
    if len(nodes) == 1:
        ring.node = Node(ring, ring.comm, nodes[0], None, stage_bytes)
    else:
        number = next(number for number, node in enumerate(nodes) if ring.rank in node)
        place = nodes[number].index(ring.rank)
        across = Ring(ring.comm.Split(place, number), names=[node[place] for node in nodes])
        across.counters = ring.counters  # what it sends, the ring sends
        ring.node = Node(ring, ring.comm.Split(number, place), nodes[number], across, stage_bytes)
    # before anybody writes there, owners have cleared it; nobody hears here of what others call next
    ring.progress.wait(ring.comm.Ibarrier().Test)


def allocate_shared(ring: Ring, nbytes: int) -> np.ndarray:
    """Memory as buffer.allocate gives it; shared, where the ranks share a node and there is room. Collective."""
    memory = ring.node.allocate(nbytes) if ring.node is not None else None
    return allocate(nbytes) if memory is None else memory
