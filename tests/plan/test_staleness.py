"""The clock of stale synchronous parallel: the bound holds, reads see what they must, nobody waits for ever."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.staleness import StalenessClock, largest_lag


class Run:
    """Workers that read at their clock, then finish an iteration; each step of one of them is drawn at random."""

    def __init__(self, steps: list[int], bound: float, seed: int, weights: list[float]):
        self.clock, self.bound, self.draw = StalenessClock(len(steps), bound), bound, random.Random(seed)
        self.steps, self.weights = steps, weights
        self.state = ["ask"] * len(steps)
        self.updates: list[tuple[int, int]] = []  # worker and stamp, in the order applied
        self.read_at = [0] * len(steps)  # updates there at the last read
        self.gaps, self.lags = [], []

    def serve(self, worker: int) -> None:
        clock = self.clock.clocks[worker]
        self.gaps.append(self.clock.gap(clock))
        runs = [w for w in range(len(self.steps)) if self.clock.running[w]]
        for other in runs:
            seen = {stamp for w, stamp in self.updates if w == other}
            needed = clock if other == worker else clock - self.bound
            assert self.bound == inf and other != worker or seen >= set(range(int(max(0, needed))))
        self.read_at[worker], self.state[worker] = len(self.updates), "compute"

    def go(self) -> None:
        while any(state != "gone" for state in self.state):
            able = [w for w, state in enumerate(self.state) if state in ("ask", "compute")]
            assert able, f"all wait: {self.clock.clocks}"
            self.move(self.draw.choices(able, [self.weights[w] for w in able])[0])

    def move(self, worker: int) -> None:
        clock = self.clock
        if self.state[worker] == "compute":
            self.lags.append(len(self.updates) - self.read_at[worker])
            self.updates.append((worker, clock.clocks[worker]))
            clock.tick(worker)
            self.state[worker] = "ask"
        elif clock.clocks[worker] == self.steps[worker]:
            clock.retire(worker)
            self.state[worker] = "gone"
        elif clock.admits(worker, clock.clocks[worker]):
            self.serve(worker)
        else:
            clock.park(worker, clock.clocks[worker], worker)
            self.state[worker] = "parked"
        for released in clock.release():
            self.serve(released)


@given(
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    bound=st.sampled_from([0, 1, 2, 3, 8, inf]),
    seed=st.integers(0, 10**6),
    slow=st.integers(0, 5),
)
def test_the_bound_holds_and_nobody_waits_for_ever(steps, bound, seed, slow):
    """Also with workers that finish early, that have nothing to do, and one that is slow."""
    run = Run(steps, bound, seed, [0.05 if worker == slow else 1.0 for worker in range(len(steps))])
    run.go()
    assert sorted(run.updates) == sorted((w, clock) for w, count in enumerate(steps) for clock in range(count))
    assert all(gap <= bound for gap in run.gaps)
    assert all(lag <= largest_lag(bound, len(steps)) for lag in run.lags)


@pytest.mark.parametrize("bound", (0, 1, 3))
def test_the_largest_lag_is_reached_and_not_passed(bound):
    """Two workers: one reads as far ahead as it may, then the other goes as far as it gets."""
    clock = StalenessClock(2, bound)
    for _ in range(bound):
        clock.tick(0)
    assert clock.admits(0, bound), "the other is behind by the bound"
    overtaken = 0
    while clock.admits(1, clock.clocks[1]):
        clock.tick(1)
        overtaken += 1
    assert overtaken == largest_lag(bound, 2)


def test_a_read_waits_for_the_slowest_and_is_released_in_order():
    clock = StalenessClock(3, 1)
    for _ in range(2):
        clock.tick(0)
    clock.tick(1)
    clock.tick(1)
    assert not clock.admits(0, 2) and clock.gap(2) == 2 and clock.min_clock == 0
    clock.park(0, 2, "first")
    clock.park(1, 2, "second")
    assert clock.release() == [] and clock.num_parked == 2
    clock.tick(2)
    assert clock.release() == ["first", "second"] and clock.num_parked == 0


def test_a_read_waits_for_its_own_update_too():
    clock = StalenessClock(2, inf)
    assert not clock.admits(0, 1), "asked for before its own update 0 is there"
    clock.tick(0)
    assert clock.admits(0, 1)


def test_a_pull_may_have_a_bound_of_its_own():
    clock = StalenessClock(2, inf)
    clock.tick(0)
    assert clock.admits(0, 1) and not clock.admits(0, 1, bound=0)
    clock.park(0, 1, "fresh", bound=0)
    assert clock.release() == []
    clock.tick(1)
    assert clock.release() == ["fresh"]


def test_who_leaves_is_not_waited_for():
    clock = StalenessClock(3, 0)
    clock.tick(0)
    clock.tick(1)
    clock.park(0, 1, 0)
    clock.retire(2)
    assert clock.min_clock == 1 and clock.release() == [0]
    with pytest.raises(ValueError, match="worker 2 has retired at clock 0"):
        clock.tick(2)
    clock.retire(0)
    clock.retire(1)
    assert clock.min_clock == 1
