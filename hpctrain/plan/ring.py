"""The steps of a ring all-reduce for one rank (Patarasuk and Yuan, JPDC 2009).

n ranks sit on a ring; each sends to its right neighbour (rank + 1) and receives from its left one. The array is cut
into n chunks. In n - 1 steps of scatter-reduce every chunk travels once round the ring and grows by one rank's share
at each stop; it ends at its owner, rank = chunk number. In n - 1 steps of all-gather the finished chunks travel round
once more.

    n = 3, chunk sent by each rank       scatter-reduce          all-gather
                                         step 0    step 1        step 0    step 1
                               rank 0      2         1             0         2
                               rank 1      0         2             1         0
                               rank 2      1         0             2         1

Chunk c is summed in the order c + 1, c + 2, ..., c (mod n) whoever computes it, so all ranks end with the same bits.
"""

from typing import NamedTuple


class RingStep(NamedTuple):
    """Chunk numbers of one step: what goes to the right neighbour, what comes from the left one."""

    send: int
    receive: int


def scatter_reduce(rank: int, num_ranks: int) -> list[RingStep]:
    """The received chunk is added to the own one; after the last step `rank` owns the whole sum of chunk `rank`."""
    return [RingStep((rank - step - 1) % num_ranks, (rank - step - 2) % num_ranks) for step in range(num_ranks - 1)]


def all_gather(rank: int, num_ranks: int) -> list[RingStep]:
    """The received chunk replaces the own one; begins with chunk `rank`, ends with all chunks everywhere."""
    return [RingStep((rank - step) % num_ranks, (rank - step - 1) % num_ranks) for step in range(num_ranks - 1)]
