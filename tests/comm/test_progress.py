"""How a rank waits: short waits at once, long ones asleep; everything under way moves on, and an error comes through.

Under a clock of our own, so that nothing depends on the machine.
"""

import pytest

from hpctrain.comm import progress as progress_module
from hpctrain.comm.progress import (
    LATE_SECONDS,
    LONGEST_SLEEP,
    NUM_SPINS,
    NUM_YIELDS,
    SHORTEST_SLEEP,
    SLEEP_SHARE,
    Backoff,
    Progress,
    wait_until,
)


class Clock:
    """Time that passes only in sleeps; each yield is noted."""

    def __init__(self, monkeypatch):
        self.now, self.sleeps, self.yields = 100.0, [], 0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(progress_module.time, "sleep", self._sleep)
        monkeypatch.setattr(progress_module.os, "sched_yield", self._yield)

    def _sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds

    def _yield(self):
        self.yields += 1


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Countdown:
    """Done at the `looks`-th poll; `error` is raised instead."""

    def __init__(self, looks: int, error: Exception | None = None):
        self.looks, self.error, self.polls = looks, error, 0

    def poll(self) -> bool:
        self.polls += 1
        if self.polls >= self.looks and self.error:
            raise self.error
        return self.polls >= self.looks


def test_a_wait_spins_then_yields_then_sleeps(clock):
    backoff = Backoff()
    for _ in range(NUM_SPINS):
        backoff.pause()
    assert (clock.yields, clock.sleeps) == (0, [])
    for _ in range(NUM_YIELDS):
        backoff.pause()
    assert (clock.yields, clock.sleeps) == (NUM_YIELDS, [])
    backoff.pause()
    assert clock.yields == NUM_YIELDS and clock.sleeps == [SHORTEST_SLEEP]


def test_sleeps_grow_with_the_wait_up_to_the_longest(clock):
    backoff = Backoff()
    while clock.now < 101:
        began = clock.now
        backoff.pause()
        if clock.now > began:
            share = SLEEP_SHARE * (began - 100)
            assert clock.sleeps[-1] == pytest.approx(min(max(share, SHORTEST_SLEEP), LONGEST_SLEEP))
    assert clock.sleeps == sorted(clock.sleeps) and clock.sleeps[-1] == LONGEST_SLEEP
    assert len(clock.sleeps) < 700


def test_waking_late_costs_at_most_a_share_of_the_wait(clock):
    backoff = Backoff()
    for _ in range(2000):
        backoff.pause()
        waited = clock.now - 100
        assert not clock.sleeps or clock.sleeps[-1] <= max(SLEEP_SHARE * waited, SHORTEST_SLEEP)


def test_finished_operations_are_forgotten_and_not_polled_again():
    progress = Progress()
    short, long = Countdown(1), Countdown(3)
    progress.add(short)
    progress.add(long)
    for _ in range(5):
        progress.poll()
    assert (short.polls, long.polls) == (1, 3)
    assert not progress._active


def test_an_operation_added_twice_is_polled_once_a_round():
    progress, operation = Progress(), Countdown(10)
    progress.add(operation)
    progress.add(operation)
    progress.poll()
    assert operation.polls == 1


def test_an_operation_that_another_one_starts_is_not_lost():
    progress, second = Progress(), Countdown(2)

    class First:
        def poll(self):
            progress.add(second)
            return True

    progress.add(First())
    for _ in range(4):
        progress.poll()
    assert second.polls == 2


def test_a_removed_operation_is_polled_no_more():
    progress, operation = Progress(), Countdown(10)
    progress.add(operation)
    progress.remove(operation)
    progress.remove(operation)
    progress.poll()
    assert operation.polls == 0


def test_while_one_thing_is_waited_for_all_others_move_on(clock):
    progress, other, awaited = Progress(), Countdown(30), Countdown(100)
    progress.add(other)
    progress.wait(awaited.poll)
    assert (awaited.polls, other.polls) == (100, 30)


def test_what_is_waited_for_is_not_kept_afterwards(clock):
    progress, operation = Progress(), Countdown(1)
    progress.add(operation)
    progress.wait(lambda: True)
    assert not progress._active


def test_the_error_of_an_operation_reaches_whoever_waits(clock):
    progress = Progress()
    progress.add(Countdown(5, error=RuntimeError("ranks disagree")))
    with pytest.raises(RuntimeError, match="ranks disagree"):
        progress.wait(lambda: False)


@pytest.mark.parametrize("seconds, times", [(0.5 * LATE_SECONDS, 0), (3 * LATE_SECONDS, 1)])
def test_a_wait_that_is_late_is_told_once(clock, seconds, times):
    told, end = [], clock.now + seconds
    wait_until(lambda: clock.now > end, lambda: told.append(clock.now - end + seconds))
    assert len(told) == times and all(LATE_SECONDS < when < LATE_SECONDS + 2 * LONGEST_SLEEP for when in told)
