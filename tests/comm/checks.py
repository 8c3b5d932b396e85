"""The laws of the ring, as functions that return what is wrong: an empty list on every rank when a law holds.

They are used twice: on the code as it is, where nothing may be wrong, and on code with a planted bug (test_planted),
where something must be. Each is collective, and ends also where something is wrong.
"""

import hashlib
import os
import random
import re
import time

import numpy as np

from hpctrain.comm.node_sum import NodeSum
from hpctrain.comm.nodes import join_node
from hpctrain.comm.ring import Ring
from hpctrain.comm.signature import CollectiveMismatch
from tests.comm.arrays import Guarded, bits_dtype, expected_sum, same, share
from tests.comm.watched import WatchedComm
from tests.oracles.ring_sum import chunk_slices

CONTROL_TAG = 1
MOST_WHILE_WAITING = 0.05  # of a core
CALLS = [
    ("all_reduce", "float64", 100, "loss"),
    ("all_reduce", "float64", 100, "grad"),
    ("all_reduce", "float64", 98, "loss"),
    ("all_reduce", "float64", 0, "loss"),
    ("all_reduce", "float64", 30_000, "loss"),
    ("all_reduce", "float32", 200, "loss"),
    ("reduce_scatter", "int64", 100, "loss"),
    ("all_gather", "float64", 100, "loss"),
]
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "both")


def sums(
    comm, peers, dtype, lengths, *, operation="all_reduce", kind="random", segment_bytes=1 << 20, seed=0
) -> list[str]:
    """Every length at a time: the sum in ring order, the same bits on every rank, nothing else touched.

    `operation` both: a reduce-scatter, then an all-gather of the same array.
    """
    ring = Ring(comm, segment_bytes=segment_bytes)
    everything = [[share(dtype, length, rank, seed, kind) for rank in range(comm.size)] for length in lengths]
    arrays = [Guarded(dtype, shares[comm.rank]) for shares in everything]
    for part in ["reduce_scatter", "all_gather"] if operation == "both" else [operation]:
        under_way = [getattr(ring, part)(array.array, f"{part} {len(array.bits)}").start() for array in arrays]
        for collective in under_way:
            collective.wait()
    ring.close()
    problems, digest = [], hashlib.sha256()
    for shares, array in zip(everything, arrays, strict=True):
        where = f"{operation} {dtype} x {len(array.bits)}"
        right, part = wanted(dtype, shares, kind, operation, comm.rank)
        if not same(array.bits[part], right[part], dtype):
            problems.append(f"{where}: {array.bits[part][:20]} instead of {right[part][:20]}")
        if not array.guards_untouched():
            problems.append(f"{where}: memory beside the array was changed")
        digest.update(array.bits.tobytes())
    if operation != "reduce_scatter" and len(set(peers.everybody(digest.hexdigest()))) > 1:
        problems.append(f"{operation} {dtype}: ranks hold different bits")
    return problems


def wanted(dtype, shares, kind, operation, rank) -> tuple[np.ndarray, slice]:
    """The right values, and which part of the array this rank must hold."""
    chunks = chunk_slices(len(shares[0]), len(shares))
    if operation == "all_gather":
        return np.concatenate([own[chunk] for own, chunk in zip(shares, chunks, strict=True)]), slice(None)
    return expected_sum(dtype, shares, kind), chunks[rank] if operation == "reduce_scatter" else slice(None)


def traffic(comm, dtype="float64", length=1001, segment_bytes=1 << 20, operation="all_reduce") -> list[str]:
    """Bytes and messages by the formula, by the code's own count and by an independent one.

    A reduce-scatter sends every chunk but the own one, an all-gather every chunk but the next rank's; partial sums of
    16-bit floats take four bytes. A chunk is cut into as many messages as the longest one needs.
    """
    watched = WatchedComm(comm)
    ring = Ring(watched, segment_bytes=segment_bytes)
    getattr(ring, operation)(Guarded(dtype, np.ones(length, bits_dtype(dtype))).array).wait()
    rank, size = comm.rank, comm.size
    chunks = [len(range(length)[chunk]) for chunk in chunk_slices(length, size)]
    item = bits_dtype(dtype).itemsize
    partial = item if operation == "all_gather" or dtype not in ("float16", "bfloat16") else 4
    scattered = (length - chunks[rank]) * partial * (operation != "all_gather")
    gathered = (length - chunks[(rank + 1) % size]) * item * (operation != "reduce_scatter")
    pieces = max(1, -(-chunks[0] * partial // segment_bytes))
    steps = (2 if operation == "all_reduce" else 1) * (size - 1)
    wanted = (scattered + gathered, steps * pieces, 1 if size > 1 else 0)
    payload = {tag: count for tag, count in watched.messages.items() if tag != CONTROL_TAG}
    counted = (sum(watched.bytes[tag] for tag in payload), sum(payload.values()), watched.messages[CONTROL_TAG])
    own = (ring.counters.bytes_sent, ring.counters.messages_sent, ring.counters.control_messages)
    ring.close()
    what = f"{operation} {dtype} x {length}, {segment_bytes} bytes a segment: (bytes, messages, control)"
    problems = [f"{what} {got}, {by} {wanted}" for got, by in ((counted, "by formula"),) if got != wanted]
    return problems + ([] if own == counted else [f"{what} {own} by its own count, in truth {counted}"])


def buffer_rules(comm, seed=0, laziness=5) -> list[str]:
    """All operations in few and in many segments over a lazy network: the rules of buffers hold, the sums are right."""
    watched = WatchedComm(comm, laziness, seed)
    ring = Ring(watched)
    problems = []
    for dtype, segment_bytes in (("float64", 64), ("float64", 300), ("float16", 64)):
        ring.segment_bytes = segment_bytes
        for operation in ("all_reduce", "reduce_scatter", "all_gather"):
            shares = [share(dtype, 151, rank, seed) for rank in range(comm.size)]
            array = shares[comm.rank].copy()
            collective = getattr(ring, operation)(array).start()
            while not collective.poll():
                os.sched_yield()
            right, part = wanted(dtype, shares, "random", operation, comm.rank)
            if not same(array[part], right[part], dtype):
                problems.append(f"{operation} of {dtype} over a lazy network is wrong")
    ring.close()
    return sorted(set(problems + watched.problems))


def disagreement(comm, seed, calls=None, odd=None, in_node=False) -> list[str]:
    """One rank makes another call than the others: everybody's call ends with the error that names both.

    First come calls on which all agree; some of them are still under way then. `calls`: what the others call and what
    rank `odd` calls, as (operation, dtype, length, name); drawn from `seed` by default. `comm` is not used again.
    `in_node`: all-reduces go through shared memory.
    """
    rng = random.Random(seed)
    odd = rng.randrange(comm.size) if odd is None else odd
    usual, other = calls or rng.sample(CALLS, 2)
    watched = WatchedComm(comm)
    ring = Ring(watched, segment_bytes=rng.choice([1000, 1 << 20]))
    if in_node:
        join_node(ring, stage_bytes=8 << 10)
    lengths = [rng.choice([0, 5, 3000, 5000]) for _ in range(rng.randrange(4))]
    agreed = [_made(ring, "all_reduce", np.ones(length), "agreed") for length in lengths]
    under_way = rng.randint(0, len(agreed))
    try:
        for collective in agreed:
            collective.start()
        for collective in agreed[under_way:]:
            collective.wait()
        operation, dtype, length, name = other if comm.rank == odd else usual
        _made(ring, operation, np.ones(length, dtype), name).wait()
        problems = ["the calls were taken for the same"]
    except CollectiveMismatch as error:
        problems = _unnamed(str(error), odd, usual, other) + _accepted(ring, agreed)
    ring.close()
    left = [request for request in watched.pending if request.what == "receive"]
    problems += [f"MPI still fills the memory of {len(left)} receives"] if left else []
    return [f"seed {seed}, rank {odd} calls {other} instead of {usual}: {problem}" for problem in problems]


def _made(ring, operation, array, name):
    if operation == "all_reduce" and ring.node is not None:
        return NodeSum(ring.node, array, name)
    return getattr(ring, operation)(array, name)


def _unnamed(text, odd, usual, other) -> list[str]:
    """What the error should name and does not: the odd rank's call and that of another one."""
    calls = re.findall(r"rank (\d+) call \d+ (\w+) '(\w+)' \((\S+) x (\d+)\)", text)
    named = {int(rank) == odd: call for rank, *call in calls}
    wanted = {
        odds: [call[0], call[3], np.dtype(call[1]).str[1:], str(call[2])]
        for odds, call in ((True, other), (False, usual))
    }
    return [] if named == wanted else [f"'{text}' names {calls}"]


def _accepted(ring, collectives) -> list[str]:
    """Calls that the broken ring does not refuse at once: a new one, and those that were started before."""
    problems = []
    for collective in [ring.all_reduce(np.ones(3)), *collectives]:
        try:
            collective.start()
            problems.append(f"the broken ring took another {collective.name}")
        except CollectiveMismatch:
            pass
    return problems


def waiting(comm, peers, prepare, seconds: float) -> tuple[list[str], list[float]]:
    """Who waits for rank 0, which computes for `seconds` first, uses next to nothing; also the shares of a core used.

    `prepare()` gives (wait, tidy_up), both collective. The best of three: on a crowded machine a look at MPI is dearer.
    """
    for _ in range(3):
        wait, tidy_up = prepare()
        peers.everybody()
        began, used = time.monotonic(), time.process_time()
        while comm.rank == 0 and time.monotonic() - began < seconds:
            sum(range(1000))
        wait()
        share = (time.process_time() - used) / (time.monotonic() - began)
        shares = peers.everybody(share)[1:]
        tidy_up()
        if max(shares) < MOST_WHILE_WAITING:
            return [], shares
    return [f"{max(shares):.0%} of a core while waiting"], shares
