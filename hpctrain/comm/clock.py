"""Clocks of different ranks on one scale, so that what they recorded can be laid side by side.

Each rank asks rank 0 for its time, again and again. The answer was read somewhere between question and receipt, so
half of that round trip bounds the error; of all exchanges the one with the shortest round trip counts.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.comm.tags import CLOCK

NUM_EXCHANGES = 20


def clock_offsets(group: Group, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Seconds to add to this rank's `clock()` to get that of rank 0, and by how many they may be wrong.

    Nothing else may be under way on `group`. Raises CollectiveMismatch as its methods do. Collective.
    """
    if group.size == 1:
        return 0.0, 0.0
    group.ring.agree("clock_offsets")
    if group.rank == 0:
        for peer in range(1, group.size):
            for _ in range(NUM_EXCHANGES):
                _answer(group, peer, clock)
        return 0.0, 0.0
    return best_offset([_ask(group, clock) for _ in range(NUM_EXCHANGES)])


def best_offset(exchanges: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Offset and error by the shortest of some exchanges: asked and received on the own clock, the answer between."""
    asked, answer, received = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return answer - (asked + received) / 2, (received - asked) / 2


def _ask(group: Group, clock: Callable[[], float]) -> tuple[float, float, float]:
    answer = np.empty(1)
    receive = group.comm.Irecv(answer, 0, CLOCK)
    asked = clock()
    _send(group, 0, asked)
    group.progress.wait(receive.Test)
    return asked, float(answer[0]), clock()


def _answer(group: Group, peer: int, clock: Callable[[], float]) -> None:
    question = np.empty(1)
    group.progress.wait(group.comm.Irecv(question, peer, CLOCK).Test)
    _send(group, peer, clock())


def _send(group: Group, peer: int, seconds: float) -> None:
    message = np.array([seconds])
    group.progress.wait(group.comm.Isend(message, peer, CLOCK).Test)


class Clock:
    """This rank's clock against that of rank 0 over a whole run, compared when made and by `end`.

    `offset` is the mean of both, `error` says how far off it may be: two clocks run apart a little, so at either end of
    a long run the mean is off by half of what they drifted.
    """

    def __init__(self, group: Group):
        self._group = group
        self._first = clock_offsets(group)
        self.offset, self.error = self._first

    def end(self) -> None:
        """Collective."""
        (first, before), (last, after) = self._first, clock_offsets(self._group)
        self.offset, self.error = (first + last) / 2, max(before, after) + abs(last - first) / 2
