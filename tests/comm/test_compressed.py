"""Sums whose messages carry bfloat16: the bits of an oracle on all ranks, half the bytes, an error within its bound."""

import hashlib
from itertools import product

import numpy as np
import pytest

from hpctrain import AllReduce, Mesh
from hpctrain.comm import nodes
from hpctrain.comm.compressed import doubling
from hpctrain.comm.ring import Ring
from hpctrain.comm.signature import CollectiveMismatch
from hpctrain.plan.allreduce import BUILT_IN, Constants
from tests.comm import compressed_checks as checks
from tests.comm.arrays import share
from tests.planted import compress_bugs

pytestmark = pytest.mark.mpi
DTYPES = ("float32", "float64")
REFUSED = r"compress='bf16': 'x' is \S+; only sums of float32 and float64 are compressed"


def lengths(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 40, 1001, 20_011})


@pytest.mark.parametrize("operation", checks.OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divisor", [1, 3])
def test_the_bits_are_those_of_the_oracle(comm, peers, shared_seed, dtype, operation, divisor):
    """Also in segments, and over a network that is slow to let go of memory."""
    how = {"divisor": divisor if comm.size > 1 else 1, "seed": shared_seed}
    assert checks.sums(comm, peers, dtype, operation, lengths(comm.size), **how) == []
    assert checks.sums(comm, peers, dtype, operation, [151, 999], segment_bytes=64, laziness=5, **how) == []


@pytest.mark.parametrize("operation", checks.OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_stays_within_its_bound(comm, shared_seed, dtype, operation):
    assert checks.bounds(comm, dtype, operation, 10_001, shared_seed) == []


@pytest.mark.parametrize("operation", checks.OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length, segment_bytes", [(0, 1000), (3, 1000), (1001, 100), (10_000, 1 << 20)])
def test_each_number_takes_two_bytes(comm, dtype, operation, length, segment_bytes):
    assert checks.traffic(comm, dtype, operation, length, segment_bytes) == []


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_all_ranks(comm, algorithm, value):
    with Mesh(comm) as mesh:
        for patterns in ([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], [None] * 4):
            array = np.ones(4, np.float32)
            if comm.rank == comm.size - 1:
                array[:] = value if patterns[0] is None else np.array(patterns, np.uint32).view(np.float32)
            AllReduce(mesh, algorithm=algorithm, compress="bf16")(array)
            expected = np.full(4, value if patterns[0] is None else np.nan)
            assert np.array_equal(array, expected, equal_nan=True)


@pytest.mark.mpi(min_size=2)
def test_what_float32_cannot_hold_becomes_infinite(comm):
    with Mesh(comm) as mesh:
        for algorithm in ("ring", "doubling"):
            assert (AllReduce(mesh, algorithm=algorithm, compress="bf16")(np.full(9, 1e39)) == np.inf).all()


def test_within_a_node_nothing_is_sent_and_nothing_rounded(comm):
    with Mesh(comm) as mesh:
        array = np.full(10_000, 1 + 2.0**-20, np.float32)
        AllReduce(mesh, compress="bf16", algorithm="windows" if comm.size > 1 else "auto")(array)
        assert (array == np.float32(comm.size * (1 + 2.0**-20))).all()
        assert mesh.data.ring.counters.bytes_sent == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_one_node_auto_gives_the_bits_of_none_whatever_it_takes(comm, monkeypatch, shared_seed, dtype):
    own = np.random.default_rng([shared_seed, comm.rank]).standard_normal(300_011).astype(dtype)
    told = set()
    for has_room in (True, False):
        if not has_room:
            monkeypatch.setattr(nodes, "has_room", lambda *_: False)
        for constants in (BUILT_IN, Constants(largest_staged=0), Constants(largest_staged=1 << 30)):
            with Mesh(comm) as mesh:
                mesh.data.ring.constants = constants
                for compress, place in product(("none", "bf16"), ("window", "elsewhere")):
                    reduce = AllReduce(mesh, compress=compress)
                    array = reduce.empty(len(own), dtype) if place == "window" else np.empty_like(own)
                    array[:] = own
                    told.add(hashlib.sha256(reduce(array).tobytes()).hexdigest())
                    del array
    assert len(told) == 1


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("place", ["window", "elsewhere"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [5, 3000, 300_011])
def test_what_crosses_between_nodes_is_rounded(comm, peers, monkeypatch, shared_seed, dtype, place, length):
    if comm.size % 2:
        pytest.skip("two nodes of equally many ranks")
    monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank // (comm.size // 2))
    shares = [np.random.default_rng([shared_seed, rank]).standard_normal(length) for rank in range(comm.size)]
    with Mesh(comm) as mesh:
        reduce = AllReduce(mesh, "mean", "windows", "bf16")
        array = reduce.empty(length, dtype) if place == "window" else np.empty(length, dtype)
        array[:] = shares[comm.rank]
        reduce(array, "x")
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        sent = sum(peers.everybody(mesh.data.ring.counters.bytes_sent))
        exact, magnitude = np.mean(shares, axis=0), np.mean(np.abs(shares), axis=0)
        assert (np.abs(array - exact) <= 2 * 2.0**-8 * magnitude).all() and (length < 9 or (array != exact).any())
        del array
    assert len(set(peers.everybody(digest))) == 1
    assert sent == 2 * 2 * length  # over two nodes each sends half of the numbers twice, or all once


@pytest.mark.parametrize("algorithm", ["auto", "ring", "doubling"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "float16", "complex64", ">f4"])
def test_what_is_no_float_of_32_or_64_bits_is_refused(comm, algorithm, dtype):
    with Mesh(comm) as mesh, pytest.raises(ValueError, match=REFUSED):
        AllReduce(mesh, algorithm=algorithm, compress="bf16")(np.ones(3, dtype), "x")


def test_an_unknown_compression_is_refused():
    with pytest.raises(ValueError, match="compress='fp8': it is 'none' or 'bf16'"):
        AllReduce(Mesh(None), compress="fp8")
    for call in (Ring().all_reduce, Ring().reduce_scatter):
        with pytest.raises(ValueError, match="compress='topk:0.1': it is 'none' or 'bf16'"):
            call(np.ones(3, np.float32), "x", "topk:0.1")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["ring", "doubling", "windows"])
def test_ranks_that_disagree_about_it_are_told(fresh_comm, algorithm):
    mesh = Mesh(fresh_comm())
    with pytest.raises(CollectiveMismatch, match=r"\(f4 as bf16 x 5\)"):
        AllReduce(mesh, algorithm=algorithm, compress="bf16" if mesh.rank == 0 else "none")(np.ones(5, np.float32), "x")
    mesh.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [Ring.all_reduce, doubling])
def test_again_and_again_it_takes_no_further_memory(comm, make_ring, monkeypatch, make):
    array = share("float32", 5000, comm.rank, 1)
    call = make(make_ring(), array, "x", "bf16")
    call.run()
    monkeypatch.setattr("hpctrain.comm.compressed.allocate", None)
    monkeypatch.setattr("hpctrain.comm.collective.allocate", None)
    monkeypatch.setattr("hpctrain.comm.doubling.allocate", None)
    call.run()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation, bugs", [("all_reduce", compress_bugs.RING), ("doubling", compress_bugs.DOUBLING)])
def test_a_planted_bug_is_seen(fresh_comm, peers, monkeypatch, operation, bugs):
    for bug, min_size in bugs.items():
        if peers.size < min_size or (bug is compress_bugs.those_beyond_get_another_sum and peers.size in (4, 8)):
            continue
        with monkeypatch.context() as planted, np.errstate(all="ignore"):
            bug(planted)
            found = checks.sums(fresh_comm(), peers, "float32", operation, [3000], divisor=3)
        assert any(peers.everybody(found)), bug.__name__
        assert not any(peers.everybody(checks.sums(fresh_comm(), peers, "float32", operation, [3000], divisor=3)))
