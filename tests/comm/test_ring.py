"""The ring's laws on any number of ranks: sums in ring order, the same bits everywhere, traffic by the formula.

Lengths that n does not divide, all dtypes, segments of all sizes, many calls under way, calls made again and again.
"""

import gc
import os
import random

import numpy as np
import pytest

from hpctrain.comm import collective as collective_module
from hpctrain.comm.progress import Progress
from tests.comm import checks
from tests.comm.arrays import FLOATS, INTEGERS, Guarded, expected_sum, same, share
from tests.comm.watched import WatchedComm

pytestmark = pytest.mark.mpi
SMALL = range(41)


def borders(size: int) -> list[int]:
    """Lengths at which something can go wrong."""
    return sorted({0, 1, size - 1, size, size + 1, 2 * size + 1, 40})


@pytest.mark.parametrize(
    "dtype, kind", [("float64", "whole"), ("float64", "random"), ("float16", "random"), ("int8", "random")]
)
def test_every_small_length_gives_the_sum_in_ring_order(comm, peers, shared_seed, dtype, kind):
    assert checks.sums(comm, peers, dtype, SMALL, kind=kind, seed=shared_seed) == []


@pytest.mark.parametrize("operation", checks.OPERATIONS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_every_dtype_and_operation_is_right_at_the_borders(comm, peers, shared_seed, dtype, operation):
    assert checks.sums(comm, peers, dtype, borders(comm.size), operation=operation, seed=shared_seed) == []


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_million_and_three_elements_are_summed(comm, peers, shared_seed, dtype):
    assert checks.sums(comm, peers, dtype, [1_000_003], kind="whole", seed=shared_seed) == []


@pytest.mark.parametrize("dtype", ["float16", "complex64"])
def test_large_odd_lengths_give_the_bits_of_the_ring_order(comm, peers, shared_seed, dtype):
    assert checks.sums(comm, peers, dtype, [30_011], segment_bytes=5000, seed=shared_seed) == []


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float64"])
def test_lengths_around_the_borders_of_segments_are_right(comm, peers, shared_seed, dtype):
    lengths = [length * chunks for length in (999, 1000, 1001, 2003) for chunks in (1, comm.size)]
    assert checks.sums(comm, peers, dtype, lengths, segment_bytes=1000, seed=shared_seed) == []


@pytest.mark.parametrize("message_bytes", [1 << 10, 1 << 16, 1 << 20, 1 << 25])
def test_no_size_of_message_stops_the_ring(comm, make_ring, message_bytes):
    if message_bytes > 1 << 20 and comm.size > 2:
        pytest.skip("two ranks move the largest messages")
    array = np.full(message_bytes // 8 * comm.size, comm.rank + 1.0)
    make_ring(segment_bytes=message_bytes).all_reduce(array).wait()
    assert np.all(array == comm.size * (comm.size + 1) / 2)


@pytest.mark.parametrize("shape", [(0,), (1, 0, 2), (), (1,), (3, 1, 5)])
def test_shapes_are_kept_also_without_elements(comm, make_ring, shape):
    ring = make_ring()
    array = np.ones(shape, np.float32)
    for operation in (ring.all_reduce, ring.all_gather, ring.reduce_scatter):
        array[...] = 1
        operation(array).wait()
        assert array.shape == shape and array.dtype == np.float32
    array[...] = 1
    ring.all_reduce(array).wait()
    assert np.array_equal(array, np.full(shape, comm.size, np.float32))


def test_integers_wrap_as_in_numpy(comm, make_ring):
    array = np.array([200, 1], np.uint8)
    make_ring().all_reduce(array).wait()
    assert array.tolist() == [200 * comm.size % 256, comm.size]


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.int64, np.complex64, ">f4", ">i8", "S3", "M8[s]"])
def test_all_gather_moves_any_dtype_bit_for_bit(comm, make_ring, shared_seed, dtype):
    length = 5 * comm.size + 3
    rng = np.random.default_rng(shared_seed)
    whole = rng.integers(0, 2 if dtype is np.bool_ else 256, length * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    array = np.zeros_like(whole)
    chunk = checks.chunk_slices(length, comm.size)[comm.rank]
    array[chunk] = whole[chunk]
    make_ring().all_gather(array).wait()
    assert array.tobytes() == whole.tobytes() and array.dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">f2"])
def test_numbers_of_the_other_byte_order_are_summed(comm, make_ring, shared_seed, dtype):
    native = np.dtype(dtype).newbyteorder("=").name
    shares = [share(native, 57, rank, shared_seed) for rank in range(comm.size)]
    array = shares[comm.rank].astype(dtype)
    make_ring().all_reduce(array).wait()
    assert same(array.astype(native), expected_sum(native, shares), native)


def test_calls_under_way_may_be_polled_in_any_order(comm, make_ring, shared_seed):
    ring = make_ring(Progress(), segment_bytes=100)
    rng = random.Random(shared_seed + comm.rank)
    lengths = [0, 1, 7, 40, 333, 40, 1000]
    shares = [[share("float32", n, rank, shared_seed + i) for rank in range(comm.size)] for i, n in enumerate(lengths)]
    for _ in range(2):
        arrays = [own[comm.rank].copy() for own in shares]
        calls = [ring.all_reduce(array).start() for array in arrays]
        under_way = list(calls)
        while under_way:
            collective = rng.choice(under_way)
            if collective.poll():
                under_way.remove(collective)
        for array, own in zip(arrays, shares, strict=True):
            assert same(array, expected_sum("float32", own), "float32")


def test_a_call_may_be_started_again_and_again(comm, make_ring):
    ring = make_ring()
    array = np.empty(11)
    total = ring.all_reduce(array)
    for turn in range(20):
        array[:] = turn + comm.rank
        total.start()
        total.wait()
        assert np.all(array == comm.size * turn + sum(range(comm.size))), turn


def test_wait_alone_starts_and_finishes(comm, make_ring):
    array = np.ones(3)
    total = make_ring().all_reduce(array)
    assert total.done
    total.wait()
    assert total.done and array.tolist() == [comm.size] * 3


def test_finished_calls_are_forgotten(comm, make_ring):
    progress = Progress()
    ring = make_ring(progress)
    total = ring.all_reduce(np.ones(3))
    for _ in range(5):
        total.start()
        while not total.poll():
            os.sched_yield()
    ring.all_reduce(np.ones(3)).wait()
    assert not progress._active


def test_tags_stay_small_however_many_calls_were_made(comm, make_ring, monkeypatch):
    watched = WatchedComm(comm)
    ring = make_ring(wrapper=watched)
    for number in (0, 16383, 10**7, 2**31 - 10, 2**40):
        ring.num_calls = number
        for _ in range(2):
            array = np.full(5, comm.rank + 1)
            ring.all_reduce(array).wait()
            assert np.all(array == comm.size * (comm.size + 1) // 2)
    monkeypatch.setattr(collective_module, "RING", range(2, 5))
    for _ in range(4):
        pair = [ring.all_reduce(np.ones(length)).start() for length in (3, 50)]
        for collective in pair:
            collective.wait()
    assert all(0 <= tag <= 32767 for tag in watched.messages)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8"])
def test_traffic_follows_the_formula(comm, dtype, operation):
    for length, segment_bytes in ((0, 1000), (3, 1000), (1000, 100), (1001, 1 << 20)):
        assert checks.traffic(comm, dtype, length, segment_bytes, operation) == []


def test_an_all_reduce_sends_twice_the_array_less_two_chunks(comm, make_ring):
    ring = make_ring()
    nbytes = 8 * 10_000
    ring.all_reduce(np.ones(10_000)).wait()
    assert abs(ring.counters.bytes_sent - 2 * (comm.size - 1) / comm.size * nbytes) <= 2 * 8


@pytest.mark.parametrize("turn", range(3))
def test_the_rules_of_buffers_hold_on_a_slow_network(comm, shared_seed, turn):
    assert checks.buffer_rules(comm, shared_seed + turn) == []


def test_an_array_that_its_caller_forgot_is_still_sent(comm, make_ring):
    ring = make_ring()
    array = np.full(300_000, comm.rank + 1.0)
    total = ring.all_reduce(array).start()
    if comm.rank == 0:
        array = None
        gc.collect()
        rubbish = [np.full(300_000, 1e9) for _ in range(4)]  # would lie where the array was
        del rubbish
    total.wait()
    assert array is None or np.all(array == comm.size * (comm.size + 1) / 2)


def test_what_lies_beside_the_array_is_not_touched(comm, make_ring):
    array = Guarded("float32", np.ones(1001, np.float32))
    make_ring(segment_bytes=100).all_reduce(array.array).wait()
    assert array.guards_untouched() and np.all(array.bits == comm.size)


def test_a_closed_ring_takes_no_calls(comm, make_ring):
    ring = make_ring()
    ring.close()
    ring.close()
    if comm.size > 1:
        with pytest.raises(RuntimeError, match="closed"):
            ring.all_reduce(np.ones(1)).start()


def test_closing_finishes_what_is_under_way(make_ring, comm):
    ring, array = make_ring(), np.ones(100_000)
    collective = ring.all_reduce(array).start()
    ring.close()
    assert collective.done and np.all(array == comm.size)


def test_waiting_twice_sums_once(make_ring, comm):
    array = np.ones(10)
    collective = make_ring().all_reduce(array)
    collective.wait()
    collective.wait()
    assert np.all(array == comm.size)
