"""The laws of compressed sums, as functions that say what is wrong: nothing, or something where a bug is planted."""

import hashlib
import os

import numpy as np

from hpctrain.comm.compressed import doubling
from hpctrain.comm.ring import Ring
from tests.comm.arrays import Guarded, same, share
from tests.comm.watched import WatchedComm
from tests.oracles.compressed_sum import compressed_doubling, compressed_ring
from tests.oracles.ring_sum import chunk_slices

OPERATIONS = ("all_reduce", "reduce_scatter", "doubling")
CONTROL_TAG = 1


def with_every_nan(dtype: str, length: int, rank: int, seed: int) -> np.ndarray:
    """Numbers of all sizes; where they are NaN, such as would be rounded to infinity or zero."""
    values = share(dtype, length, rank, seed)
    words = values.view(f"u{values.itemsize}")
    words[np.isnan(values)] = np.iinfo(words.dtype).max >> (seed + rank) % 2
    return values


def made(ring: Ring, operation: str, array, name: str = ""):
    return (doubling if operation == "doubling" else getattr(Ring, operation))(ring, array, name, "bf16")


def sums(comm, peers, dtype, operation, lengths, *, divisor=1, segment_bytes=1 << 20, seed=0, laziness=0) -> list[str]:
    """All lengths at once, and twice: the bits of the oracle, the same on all ranks, nothing else touched."""
    watched = WatchedComm(comm, laziness, seed)
    ring = Ring(watched, segment_bytes=segment_bytes)
    everything = [[with_every_nan(dtype, length, rank, seed) for rank in range(comm.size)] for length in lengths]
    arrays = [Guarded(dtype, shares[comm.rank]) for shares in everything]
    calls = [made(ring, operation, array.array, f"sum {number}") for number, array in enumerate(arrays)]
    oracle, problems = compressed_doubling if operation == "doubling" else compressed_ring, []
    for _ in range(2):
        digest = hashlib.sha256()
        for shares, array, call in zip(everything, arrays, calls):
            array.bits[:], call.divisor = shares[comm.rank], divisor
            call.start()
        while not all(call.poll() for call in calls):
            os.sched_yield()
        for shares, array in zip(everything, arrays):
            chunk = chunk_slices(len(array.bits), comm.size)[comm.rank]
            part = chunk if operation == "reduce_scatter" else slice(None)
            wanted = oracle(shares, divisor)
            if not same(array.bits[part], wanted[part], dtype):
                problems.append(f"{operation} of {len(array.bits)}: {array.bits[part][:9]}, not {wanted[part][:9]}")
            problems += [] if array.guards_untouched() else ["memory beside the array was changed"]
            digest.update(array.bits.tobytes())
        if operation != "reduce_scatter" and len(set(peers.everybody(digest.hexdigest()))) > 1:
            problems.append(f"{operation}: ranks hold different bits")
    ring.close()
    return problems + watched.problems


def bounds(comm, dtype, operation, length, seed=0) -> list[str]:
    """No number is further from the exact sum than ranks * 2^-8 * the sum of magnitudes."""
    ring = Ring(comm)
    shares = [np.random.default_rng([seed, rank]).standard_normal(length).astype(dtype) for rank in range(comm.size)]
    array = shares[comm.rank].copy()
    made(ring, operation, array).wait()
    ring.close()
    exact, magnitude = np.sum(shares, axis=0, dtype=np.float64), np.sum(np.abs(shares), axis=0, dtype=np.float64)
    part = chunk_slices(length, comm.size)[comm.rank] if operation == "reduce_scatter" else slice(None)
    error = np.abs(array - exact)[part] - comm.size * 2.0**-8 * magnitude[part]
    return [] if (error <= 0).all() else [f"{operation} of {dtype}: {error.max()} beyond the bound"]


def traffic(comm, dtype, operation, length, segment_bytes) -> list[str]:
    """Two bytes for each number that leaves, in as many messages as those need; by an independent count too."""
    counted = []
    for compress in ("none", "bf16"):
        watched = WatchedComm(comm)
        ring = Ring(watched, segment_bytes=segment_bytes * (1 if compress == "bf16" else np.dtype(dtype).itemsize // 2))
        array = np.ones(length, dtype)
        (made(ring, operation, array) if compress == "bf16" else plain(ring, operation, array)).wait()
        own = (ring.counters.bytes_sent, ring.counters.messages_sent)
        ring.close()
        tags = [tag for tag in watched.messages if tag != CONTROL_TAG]
        counted.append(own)
        if compress == "bf16" and own[0] != sum(watched.bytes[tag] for tag in tags if tag != CONTROL_TAG):
            return [f"{own} by its own count, in truth {watched.bytes}"]
    (whole, num_whole), (half, num_half) = counted
    right = whole * 2 == half * np.dtype(dtype).itemsize and num_whole == num_half
    return [] if right else [f"{operation} of {length} {dtype}: {counted}"]


def plain(ring: Ring, operation: str, array):
    return doubling(ring, array) if operation == "doubling" else getattr(ring, operation)(array)
