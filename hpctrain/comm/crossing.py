"""A sum over nodes: what one rank of each has summed up at home, by messages between them."""

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.call import wire_share
from hpctrain.comm.compressed import doubling
from hpctrain.comm.node import BLOCK_BYTES
from hpctrain.comm.ring import Ring
from hpctrain.plan.allreduce import by_messages

if TYPE_CHECKING:
    from hpctrain.comm.node_sum import NodeSum


class Crossing:
    """The sum of `shares`, on the way over the nodes; in the end it is in the last of them. Collective over the nodes.

    Of 16-bit floats the sums travel in float32, and are rounded when they are complete. What is to be compressed is so
    here only: by then the ranks of a node have added up their numbers as they are.
    """

    def __init__(self, total: "NodeSum", shares: list[np.ndarray]):
        native, node, own = total.native, total.node, shares[-1]
        self._total, self._own = total, own
        self._partial = own if native.partial == own.dtype else np.empty(len(own), native.partial)
        for block in blocks(len(own), native.itemsize):
            native.add_partially([share[block] for share in shares], self._partial[block], node.scratch)
        name = f"{total.name} of {len(native)}"
        nbytes = round(wire_share(total.compress, self._partial.itemsize) * self._partial.nbytes)
        by_doubling = by_messages(nbytes, node.across.size, node.ring.constants) == "doubling"
        sum_by = doubling if by_doubling else Ring.all_reduce
        self._moving = sum_by(node.across, self._partial, name, total.compress).start()

    def is_done(self) -> bool:
        """Moves it on; when True the sum is complete."""
        if not self._moving.poll():
            return False
        total = self._total
        total.node.quietly(lambda: total.native.settle(self._partial, self._own, total.divisor))
        return True


def blocks(length: int, itemsize: int) -> list[slice]:
    """So many items, in parts of at most BLOCK_BYTES."""
    most = BLOCK_BYTES // itemsize
    return [slice(begin, min(begin + most, length)) for begin in range(0, length, most)]
