"""The steps of recursive doubling for one rank: few numbers summed in about log2(n) exchanges (Thakur et al., 2005).

In step k a rank exchanges what it has with the one whose number differs in bit k, and both add. Where n is no power of
two, the ranks beyond the largest one that fits bring their numbers to a partner first, and get the sum at the end.

    n = 3        rank 0: add what 2 sends, exchange with 1, send to 2
                 rank 1:                   exchange with 0
                 rank 2: send to 0,                           receive from 0

Both partners of an exchange add the lower one's numbers first, so that all ranks hold the same bits.
"""

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What happens with the numbers in a step."""

    SEND = "send"
    ADD = "add"
    EXCHANGE = "exchange"
    RECEIVE = "receive"


class DoublingStep(NamedTuple):
    """`kind` of step with `peer`."""

    kind: Kind
    peer: int


def steps(rank: int, num_ranks: int) -> list[DoublingStep]:
    """All steps of `rank`, in order."""
    power = 1 << (num_ranks.bit_length() - 1)
    if rank >= power:
        return [DoublingStep(Kind.SEND, rank - power), DoublingStep(Kind.RECEIVE, rank - power)]
    exchanges = [DoublingStep(Kind.EXCHANGE, rank ^ (1 << bit)) for bit in range(power.bit_length() - 1)]
    if rank + power >= num_ranks:
        return exchanges
    return [DoublingStep(Kind.ADD, rank + power), *exchanges, DoublingStep(Kind.SEND, rank + power)]
