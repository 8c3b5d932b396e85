"""How a rank waits.

MPI's blocking calls spin. Where ranks outnumber cores, seven spinning ranks slow the one that computes four times and
more, so no such call is made inside a run: everything is non-blocking, and whoever has to wait polls, spins a little,
yields, then sleeps for a share of the time already waited. A short wait stays short, a long one costs next to
nothing.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

NUM_SPINS = 20  # polls without a pause: a message on its way between two running ranks
NUM_YIELDS = 20  # polls after giving the core to whoever wants it
SLEEP_SHARE = 0.05  # a sleep lasts at most this share of the wait so far, so waking late costs at most as much
SHORTEST_SLEEP, LONGEST_SLEEP = 1e-5, 2e-3  # seconds; along a pipeline each stage wakes late after the one before
TIMER_SLACK = 1000  # nanoseconds by which Linux may end a sleep late; its own 50000 make short sleeps long
LATE_SECONDS = 60.0  # in which ranks that start together have all come
SET_TIMER_SLACK = 29  # prctl's number for it


class Operation(Protocol):
    """Something under way: a collective, a message, an answer that is due."""

    def poll(self) -> bool:
        """Moves on what can be moved without waiting; True when all is done."""


class Backoff:
    """The pauses of one wait."""

    def __init__(self):
        self._polls = 0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._began

    def pause(self) -> None:
        self._polls += 1
        if self._polls <= NUM_SPINS:
            return
        if self._polls <= NUM_SPINS + NUM_YIELDS:
            os.sched_yield()
            return
        time.sleep(min(max(SLEEP_SHARE * self.seconds, SHORTEST_SLEEP), LONGEST_SLEEP))


class Progress:
    """Everything that is under way on this rank. While the rank waits for one thing, all the others move on."""

    def __init__(self):
        self._active: list[Operation] = []
        self.doing: object = "nothing yet"  # what this rank has begun last
        self.num_begun, self.is_patient = 0, False
        self._said: set[str] = set()
        sleep_precisely()

    def begin(self, what: object, is_patient: bool = False) -> None:
        """Says what this rank does next, so that a watchdog sees it get on. `is_patient`: it may take longer."""
        self.doing, self.is_patient = what, is_patient
        self.num_begun += 1

    def say_once(self, line: str) -> None:
        """On stderr."""
        if line not in self._said:
            self._said.add(line)
            print(line, file=sys.stderr)

    def add(self, operation: Operation) -> None:
        if operation not in self._active:
            self._active.append(operation)

    def remove(self, operation: Operation) -> None:
        """Forgets it, done or not."""
        if operation in self._active:
            self._active.remove(operation)

    def poll(self) -> None:
        """Polls each operation once and forgets those that are done."""
        for operation in list(self._active):
            if operation.poll():
                self.remove(operation)

    def wait(self, poll: Callable[[], bool]) -> None:
        """Returns when `poll()` is True. Raises what an operation under way raises."""
        backoff = Backoff()
        while not poll():
            self.poll()
            backoff.pause()
        self.poll()


def sleep_precisely() -> None:
    """This thread wakes from a sleep when it ought to, where the system allows to ask for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_TIMER_SLACK, TIMER_SLACK, 0, 0, 0)


def wait_until(poll: Callable[[], bool], when_late: Callable[[], None] | None = None) -> None:
    """Returns when `poll()` is True; for what has no Progress to move on meanwhile.

    `when_late` is called once, where that takes more than LATE_SECONDS.
    """
    backoff = Backoff()
    while not poll():
        backoff.pause()
        if when_late is not None and backoff.seconds > LATE_SECONDS:
            when_late()
            when_late = None


def take_back(receives) -> None:
    """Cancels posted receives; returns when MPI no longer holds their memory."""
    for request in receives:
        request.Cancel()
    wait_until(lambda: all(request.Test() for request in receives))
