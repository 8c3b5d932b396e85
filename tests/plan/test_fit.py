"""From times to constants: what was planted is found again, and borders are where they cost least. Pure."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hpctrain.plan.allreduce import BUILT_IN, Constants
from hpctrain.plan.fit import best_bucket, crossover, fit, measured_constants
from hpctrain.plan.tuning import CONSTANTS, constants_of

SIZES = [4 << 10 << 2 * power for power in range(8)]  # to 64 MiB
K, M = 1 << 10, 1 << 20


def planted(constants: Constants, num_ranks: int, sizes=SIZES):
    return (
        {size: constants.seconds_of_ring(size, num_ranks) for size in sizes},
        {size: constants.seconds_of_doubling(size, num_ranks) for size in sizes},
    )


@given(some.integers(2, 70), some.floats(1e-7, 1e-2), some.floats(1e-12, 1e-7), some.integers(1, len(SIZES)))
def test_planted_constants_are_found_again(num_ranks, latency, seconds_per_byte, num_sizes):
    ring, doubling = planted(Constants(latency, seconds_per_byte), num_ranks, SIZES[:num_sizes])
    found = fit(ring, doubling, num_ranks)
    assert found == (pytest.approx(latency, rel=1e-5), pytest.approx(seconds_per_byte, rel=1e-5))


@given(some.integers(2, 9), some.lists(some.floats(-0.05, 0.05), min_size=16, max_size=16))
def test_noise_of_some_percent_moves_them_by_some_percent(num_ranks, noise):
    ring, doubling = planted(BUILT_IN, num_ranks)
    ring = {size: time * (1 + off) for (size, time), off in zip(ring.items(), noise)}
    doubling = {size: time * (1 + off) for (size, time), off in zip(doubling.items(), noise[8:])}
    found = fit(ring, doubling, num_ranks)
    assert found == (pytest.approx(BUILT_IN.latency, rel=0.2), pytest.approx(BUILT_IN.seconds_per_byte, rel=0.2))


@given(some.integers(2, 9), some.lists(some.floats(1e-9, 1e3), min_size=16, max_size=16))
def test_whatever_the_times_constants_can_be_used(num_ranks, times):
    ring, doubling = dict(zip(SIZES, times)), dict(zip(SIZES, times[8:]))
    found = measured_constants(ring, doubling, num_ranks, staged=dict(zip(SIZES, reversed(times))))
    values = {key: getattr(found, key) for key in CONSTANTS}
    assert constants_of(values) == found


def test_times_that_fall_with_the_bytes_leave_one_of_both():
    falling = {4 * K: 1.0, M: 0.5, 64 * M: 0.1}
    latency, seconds_per_byte = fit(falling, falling, 2)
    assert latency > 0.01 and seconds_per_byte == CONSTANTS["seconds_per_byte"].low
    steep = {4 * K: 1e-9, M: 1e-3, 64 * M: 10.0}
    latency, seconds_per_byte = fit(steep, steep, 2)
    assert latency == CONSTANTS["latency"].low and seconds_per_byte > 1e-15


@pytest.mark.parametrize(
    "small, large, border",
    [
        ([1, 2, 4, 8], [2, 3, 3, 4], 16 * K),
        ([1, 1, 1, 1], [2, 2, 2, 2], 256 * K),
        ([2, 2, 2, 2], [1, 1, 1, 1], 0),
        ([1, 1, 1, 1], [1, 1, 1, 1], 256 * K),
        ([1, 9, 1, 9], [2, 8, 2, 8], 64 * K),  # not monotone: one bad size in front of a good one
        ([9, 1, 9, 9], [1, 8, 8, 8], 0),  # the loss in front is more than what follows brings
        ([2, 1, 9, 9], [1, 8, 8, 8], 16 * K),
    ],
)
def test_the_border_is_where_it_costs_least(small, large, border):
    sizes = SIZES[:4]
    assert crossover(dict(zip(sizes, small)), dict(zip(sizes, large))) == border


@given(some.lists(some.tuples(some.floats(1e-6, 10), some.floats(1e-6, 10)), min_size=1, max_size=8))
def test_no_other_border_would_cost_less(pairs):
    small, large = ({size: pair[side] for size, pair in zip(SIZES, pairs)} for side in (0, 1))

    def cost(border):
        return math.fsum(math.log(small[size] if size <= border else large[size]) for size in small)

    assert cost(crossover(small, large)) == pytest.approx(min(map(cost, [0, *small])), abs=1e-9)


def test_sizes_that_one_of_both_lacks_do_not_count():
    assert crossover({4 * K: 1, 16 * K: 1}, {4 * K: 2}) == 4 * K
    assert crossover({}, {}) == 0


def test_constants_come_from_messages_between_nodes_where_there_are_several():
    slow, fast = Constants(1e-3, 1e-8), Constants(1e-6, 1e-10)
    ring, doubling = planted(fast, 8)
    between = (*planted(slow, 2), 2)
    found = measured_constants(ring, doubling, 8, between_nodes=between, spans_nodes=True)
    assert found.latency == pytest.approx(1e-3) and found.seconds_per_byte == pytest.approx(1e-8)
    alone = measured_constants(ring, doubling, 8)
    assert alone.latency == pytest.approx(1e-6) and alone.seconds_per_byte == pytest.approx(1e-10)


def test_doubling_counts_up_to_where_it_loses():
    ring, doubling = planted(Constants(1e-4, 1e-9), 4)
    wins = [size for size in SIZES if doubling[size] <= ring[size]]
    assert measured_constants(ring, doubling, 4).largest_doubled == wins[-1] < SIZES[-1]


def test_staged_windows_count_up_to_where_the_ring_wins():
    ring, doubling = planted(BUILT_IN, 8)
    staged = {size: ring[size] * (0.5 if size <= M else 2) for size in SIZES}
    assert measured_constants(ring, doubling, 8, staged).largest_staged == M
    assert measured_constants(ring, doubling, 8).largest_staged == BUILT_IN.largest_staged


def test_over_nodes_staged_windows_are_held_against_what_messages_would_take():
    """At 4 KiB, doubling would take less than the ring does."""
    ring, doubling = planted(Constants(1e-3, 1e-9), 8)
    staged = {size: (ring[size] + doubling[size]) / 2 for size in SIZES}
    assert doubling[4 * K] < staged[4 * K] < ring[4 * K]
    spans = measured_constants(ring, doubling, 8, staged, spans_nodes=True).largest_staged
    assert spans == 0 and measured_constants(ring, doubling, 8, staged).largest_staged > 0


@pytest.mark.parametrize(
    "seconds, best",
    [
        ({256 * K: 1.0, M: 1.0, 4 * M: 1.0}, 4 * M),
        ({256 * K: 1.0, M: 0.98, 4 * M: 1.5}, M),
        ({256 * K: 1.0, M: 1.019, 4 * M: 1.03}, M),
        ({256 * K: 1.0, M: 1.021}, 256 * K),
        ({M: 1.0}, M),
    ],
)
def test_the_bucket_is_the_fastest_and_of_equal_ones_the_largest(seconds, best):
    assert best_bucket(seconds) == best
