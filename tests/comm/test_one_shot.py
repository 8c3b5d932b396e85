"""The sum of a few numbers in one hop: the same bits on all ranks, in rank order; whatever else is called is told."""

import numpy as np
import pytest

from hpctrain.comm import ring as ring_module
from hpctrain.comm.ring import Ring
from hpctrain.comm.signature import CollectiveMismatch
from tests.comm.arrays import share

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "uint8"])
def test_it_is_the_sum_in_rank_order_each_time_it_is_started(comm, make_ring, dtype):
    ring = make_ring()
    array = np.zeros(33, dtype)
    total = ring.one_shot(array, "few")
    for seed in range(20):
        shares = [share(dtype, len(array), rank, seed) for rank in range(comm.size)]
        wanted = shares[0].copy()
        for each in shares[1:]:
            with np.errstate(all="ignore"):
                wanted += each
        array[:] = shares[comm.rank]
        total.start().wait()
        np.testing.assert_array_equal(array, wanted)


def test_it_sends_one_message_to_each_other_rank_and_all_are_control(comm, make_ring):
    ring = make_ring()
    ring.one_shot(np.ones(100), "few").start().wait()
    assert (ring.counters.bytes_sent, ring.counters.messages_sent) == (0, 0)
    assert ring.counters.control_messages == (1 + comm.size - 1 if comm.size > 1 else 0)


def test_with_more_ranks_than_may_all_write_to_each_other_it_goes_along_the_ring(comm, make_ring, monkeypatch):
    monkeypatch.setattr(ring_module, "MOST_PEERS", 1)
    ring, array = make_ring(), np.full(100, comm.rank + 1.0)
    ring.one_shot(array, "few").start().wait()
    assert np.all(array == sum(range(1, comm.size + 1)))
    assert (ring.counters.bytes_sent, ring.counters.messages_sent) == (0, 0)
    assert ring.counters.control_messages == (1 + 2 * (comm.size - 1) if comm.size > 1 else 0)


@pytest.mark.mpi(min_size=2)
def test_several_are_under_way_beside_calls_of_the_ring(comm, make_ring):
    ring = make_ring()
    few = [np.full(3, comm.rank + number) for number in range(5)]
    many = np.full(100_000, comm.rank + 1.0)
    moving = [ring.one_shot(each, f"few {number}").start() for number, each in enumerate(few[:3])]
    moving.append(ring.all_reduce(many).start())
    moving += [ring.one_shot(each, f"few {number}").start() for number, each in enumerate(few[3:], 3)]
    for each in reversed(moving):
        each.wait()
    ranks = sum(range(comm.size))
    assert all(np.all(each == ranks + comm.size * number) for number, each in enumerate(few))
    assert np.all(many == ranks + comm.size)


OTHERS = {
    "another name": lambda ring: ring.one_shot(np.ones(3), "other").start().wait(),
    "another length": lambda ring: ring.one_shot(np.ones(4), "few").start().wait(),
    "another dtype": lambda ring: ring.one_shot(np.ones(6, np.float32), "few").start().wait(),
    "along the ring": lambda ring: ring.all_reduce(np.ones(3), "few").wait(),
    "a call too many": lambda ring: [ring.one_shot(np.ones(3), name).start().wait() for name in ("loss", "few")],
    "close": lambda ring: ring.close(),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", OTHERS)
def test_whoever_calls_something_else_is_told_on_all_ranks(fresh_comm, peers, other):
    for odd in range(peers.size):
        ring = Ring(fresh_comm())
        with pytest.raises(CollectiveMismatch, match="few|loss"):
            if peers.rank == odd:
                OTHERS[other](ring)
            else:
                ring.one_shot(np.ones(3), "few").start().wait()
        ring.close()
