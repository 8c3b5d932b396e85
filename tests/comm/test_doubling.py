"""Recursive doubling on any number of ranks: right sums, the same bits everywhere, who disagrees is told."""

import hashlib

import numpy as np
import pytest

from hpctrain import AllReduce, Mesh
from hpctrain.comm.doubling import Doubling
from hpctrain.comm.ring import Ring
from hpctrain.comm.signature import CollectiveMismatch
from hpctrain.plan.doubling import steps
from tests.comm.arrays import FLOATS, INTEGERS, Guarded, expected_sum, same, share
from tests.comm.watched import WatchedComm

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_every_dtype_gives_the_sum(comm, make_ring, shared_seed, dtype):
    ring = make_ring()
    for length in (0, 1, 40, 10_001):
        shares = [share(dtype, length, rank, shared_seed, "whole") for rank in range(comm.size)]
        guarded = Guarded(dtype, shares[comm.rank])
        Doubling(ring, guarded.array, "sum").wait()
        assert same(guarded.bits, expected_sum(dtype, shares, "whole"), dtype) and guarded.guards_untouched()


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_ranks_hold_the_same_bits(comm, peers, make_ring, shared_seed, dtype):
    array = share(dtype, 5000, comm.rank, shared_seed)
    Doubling(make_ring(), array, "sum").wait()
    assert len(set(peers.everybody(hashlib.sha256(array.tobytes()).hexdigest()))) == 1


def test_several_at_once_and_each_again(comm, make_ring):
    ring = make_ring()
    sums = [Doubling(ring, np.empty(7), f"sum {number % 2}") for number in range(12)]
    for turn in range(3):
        for number, each in enumerate(sums):
            each.native.values[:] = comm.rank + number + turn
            each.start()
        for each in reversed(sums):
            each.wait()
        wanted = [sum(range(comm.size)) + comm.size * (number + turn) for number in range(12)]
        assert [each.native.values[6] for each in sums] == wanted


def test_many_of_one_name_at_once_over_a_lazy_network(comm, peers):
    """More than there are tags for a name: messages of one call must not be taken for another's."""
    ring = Ring(WatchedComm(comm, 7, 1))
    arrays = [np.full(5, float(comm.rank + 10 * number)) for number in range(40)]
    calls = [Doubling(ring, array) for array in arrays]
    for call in calls:
        call.start()
    for call in calls:
        call.wait()
    ring.close()
    wanted = [sum(rank + 10 * number for rank in range(comm.size)) for number in range(40)]
    assert [array.tolist() for array in arrays] == [[each] * 5 for each in wanted]


def test_a_mean_of_16_bits_is_rounded_once(comm):
    with Mesh(comm) as mesh:
        array = np.full(5, 40000.0, np.float16)
        assert (AllReduce(mesh, "mean", "doubling")(array) == 40000).all()


def test_messages_are_as_many_as_the_plan_says(comm, make_ring):
    ring = make_ring()
    Doubling(ring, np.ones(100), "sum").wait()
    sends = [each for each in steps(comm.rank, comm.size) if each.kind.value in ("send", "exchange")]
    assert (ring.counters.messages_sent, ring.counters.bytes_sent) == (len(sends), 800 * len(sends))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", [0, -1])
def test_who_disagrees_is_told(fresh_comm, peers, odd):
    ring = Ring(fresh_comm())
    odd %= peers.size
    with pytest.raises(CollectiveMismatch, match=rf"rank {odd} call 0 doubling 'other' \(f8 x 6\)"):
        Doubling(ring, np.ones(5 + (ring.rank == odd)), "other" if ring.rank == odd else "usual").wait()
    ring.close()
