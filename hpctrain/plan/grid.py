"""Which rank plays which part.

A rank is one process; the grid gives it a stage (which consecutive layers) and a replica (which rows). The layout is
only numbers, so that one program serves every mode: 1 stage x n replicas is data parallel.
"""

from dataclasses import dataclass
from typing import NamedTuple

RANK_ORDERS = ("replica-fastest", "stage-fastest")


class Coordinate(NamedTuple):
    """The part that one rank plays."""

    stage: int
    replica: int


@dataclass(frozen=True)
class Grid:
    """`num_stages` x `num_replicas` ranks.

    In the default order the replicas of one stage are consecutive ranks: the ring carries most bytes and belongs
    inside a node.
    """

    num_stages: int = 1
    num_replicas: int = 1
    rank_order: str = "replica-fastest"

    def __post_init__(self):
        assert self.num_stages >= 1 and self.num_replicas >= 1, self
        assert self.rank_order in RANK_ORDERS, self.rank_order

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_replicas

    def coordinate(self, rank: int) -> Coordinate:
        assert 0 <= rank < self.num_ranks, (rank, self)
        if self.rank_order == "replica-fastest":
            return Coordinate(*divmod(rank, self.num_replicas))
        replica, stage = divmod(rank, self.num_stages)
        return Coordinate(stage, replica)

    def rank(self, stage: int, replica: int) -> int:
        if self.rank_order == "replica-fastest":
            return stage * self.num_replicas + replica
        return replica * self.num_stages + stage

    def replicas_of(self, stage: int) -> list[int]:
        """Ranks that hold the same layers, in replica order: one data-parallel ring."""
        return [self.rank(stage, replica) for replica in range(self.num_replicas)]


def split_evenly(length: int, parts: int) -> list[range]:
    """Cuts range(length) into `parts` consecutive ranges; the first length % parts of them hold one item more."""
    return [piece_of(length, parts, number) for number in range(parts)]


def piece_of(length: int, parts: int, number: int) -> range:
    """One of the ranges of split_evenly."""
    assert length >= 0 and parts >= 1, (length, parts)
    size, extra = divmod(length, parts)
    start, stop = (part * size + min(part, extra) for part in (number, number + 1))
    return range(start, stop)


def grid_of(num_ranks: int, num_stages: int, rank_order: str = "replica-fastest") -> Grid:
    """ValueError where the ranks do not divide by the stages; it says which numbers of stages would do."""
    if num_stages < 1 or num_ranks % num_stages:
        if num_ranks == 1:
            raise ValueError(f"there is one rank; start it on more, as with mpirun -n {max(2, num_stages)}")
        fitting = ", ".join(str(stages) for stages in range(1, num_ranks + 1) if num_ranks % stages == 0)
        raise ValueError(f"{num_ranks} ranks do not divide by it; {fitting} would do")
    return Grid(num_stages, num_ranks // num_stages, rank_order)
