"""How far workers may run apart: the clock of stale synchronous parallel (Ho et al., NIPS 2013).

The clock of a worker is the number of its finished iterations. A read at clock c is served when every worker that still
runs has finished c - s of them, so it sees all updates stamped up to c - s - 1; s = 0 is bulk synchronous, infinity
asynchronous. Where updates are applied one by one, one is computed with weights that at most (2s + 1)(P - 1) updates of
P workers have overtaken since.
"""

from math import inf
from typing import Generic, NamedTuple, TypeVar

Request = TypeVar("Request")


class Parked(NamedTuple, Generic[Request]):
    """A read that has to wait: of `worker` at `clock`, with its own bound."""

    worker: int
    clock: int
    bound: float
    request: Request


class StalenessClock:
    """Clocks of `num_workers`, none more than `bound` iterations behind whoever reads."""

    def __init__(self, num_workers: int, bound: float = 0):
        assert num_workers >= 1 and bound >= 0, (num_workers, bound)
        self.bound = bound
        self.clocks = [0] * num_workers
        self.running = [True] * num_workers
        self._parked: list[Parked] = []

    def begin_at(self, clock: int) -> None:
        """All workers have finished so many iterations, before anybody reads."""
        self.clocks = [clock] * len(self.clocks)

    @property
    def min_clock(self) -> int:
        """Of the workers that still run; of all, when none does."""
        return min((clock for clock, runs in zip(self.clocks, self.running) if runs), default=max(self.clocks))

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def tick(self, worker: int) -> int:
        """The worker has finished an iteration; returns its clock. ValueError for one that has retired."""
        if not self.running[worker]:
            raise ValueError(f"worker {worker} has retired at clock {self.clocks[worker]}")
        self.clocks[worker] += 1
        return self.clocks[worker]

    def retire(self, worker: int) -> None:
        """Nobody waits for this worker any more."""
        self.running[worker] = False

    def admits(self, worker: int, clock: int, bound: float | None = None) -> bool:
        """Whether a read of `worker` at `clock` may be served: it sees all its own updates up to there, and no other
        worker is further behind than the bound.
        """
        return self.clocks[worker] >= clock and self.min_clock >= clock - (self.bound if bound is None else bound)

    def gap(self, clock: int) -> int:
        """How far a read at `clock` is ahead of the slowest; 0 where it is behind."""
        return max(0, clock - self.min_clock)

    def park(self, worker: int, clock: int, request: Request, bound: float | None = None) -> None:
        """Keeps a read for `release`."""
        self._parked.append(Parked(worker, clock, self.bound if bound is None else bound, request))

    def release(self) -> list[Request]:
        """Takes out the parked reads that may be served now, first come first, and forgets those of retired workers."""
        parked, self._parked, served = self._parked, [], []
        for each in parked:
            if self.admits(each.worker, each.clock, each.bound):
                served.append(each.request)
            elif self.running[each.worker]:
                self._parked.append(each)
        return served


def largest_lag(bound: float, num_workers: int) -> float:
    """The most updates that others may have applied between a read and the update that it led to."""
    return (2 * bound + 1) * (num_workers - 1) if bound != inf else inf
