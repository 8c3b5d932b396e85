"""Clocks that start elsewhere on each rank are brought onto one scale, to within what is claimed."""

import time

import numpy as np
import pytest

from hpctrain.comm.clock import best_offset, clock_offsets
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import duplicate
from hpctrain.comm.signature import CollectiveMismatch

ROUNDING = 1e-9  # seconds; of the clocks' sums


@pytest.fixture
def group(comm):
    group = Group(duplicate(comm))
    yield group
    group.close()


@pytest.mark.mpi
@pytest.mark.parametrize("ahead", (0.0, 1000.0, -0.25))
def test_the_offset_is_the_planted_one_to_within_the_error(group, peers, ahead):
    offset, error = clock_offsets(group, lambda: time.perf_counter() + ahead * peers.rank)
    assert error >= 0
    assert abs(offset + ahead * peers.rank) <= error + ROUNDING
    assert peers.rank > 0 or (offset, error) == (0.0, 0.0)


@pytest.mark.mpi
def test_the_ring_goes_on_before_and_after(group, peers):
    for turn in range(3):
        values = np.full(100, float(peers.rank + turn))
        group.ring.all_reduce(values, "values").wait()
        clock_offsets(group)
        assert np.all(values == sum(range(peers.size)) + turn * peers.size)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_calls_something_else_is_told(fresh_comm, peers):
    group = Group(fresh_comm())
    with pytest.raises(CollectiveMismatch, match="clock_offsets"):
        group.barrier() if peers.rank == peers.size - 1 else clock_offsets(group)
    peers.everybody()
    group.close()


def test_one_rank_alone_has_the_clock():
    assert clock_offsets(Group()) == (0.0, 0.0)


def test_the_shortest_round_trip_counts():
    exchanges = [(10.0, 110.0, 18.0), (20.0, 121.5, 22.0), (30.0, 133.0, 34.0)]
    assert best_offset(exchanges) == (100.5, 1.0)
