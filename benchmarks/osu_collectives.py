"""What the collective benchmarks do in an iteration: by MPI, or as hpctrain does it; what they check."""

from functools import partial

import figures
import numpy as np
import osu
import osu_memory

from hpctrain.comm import allreduce as sums
from hpctrain.comm.nodes import allocate_shared, join_node
from hpctrain.comm.ring import Ring
from hpctrain.plan.allreduce import choose
from hpctrain.plan.grid import split_evenly

collective_test = partial(
    osu.Test,
    columns=("Avg Latency(us)",),
    iterations=(1000, 100),
    warmup=(200, 10),
    ranks="any",
    arrays=lambda ranks: 1,
)


def ring_of(bench) -> Ring:
    """One for the whole launch."""
    if not hasattr(bench, "ring"):
        bench.ring = Ring(bench.comm.Dup())
        bench.on_close += [bench.ring.close, bench.ring.comm.Free]
    return bench.ring


def join_ranks(bench) -> None:
    """What all sizes share: of windows the memory of a node. Refused where these ranks cannot. Collective."""
    algorithm, largest = bench.flags.algorithm, bench.flags.sizes[-1]
    if algorithm in ("mpi", "host"):
        return
    ring = ring_of(bench)
    if algorithm in ("auto", "windows"):
        join_node(ring)
        bench.buffers.source = partial(allocate_shared, ring)
        bench.buffers.zeros("array", largest)  # once for all sizes: what there is no room for is told once
    try:
        choose(algorithm, largest, ring.size, ring.node is not None, False)
    except ValueError as error:
        raise figures.Refused(f"--{error}") from None


def by_ring(operation):
    """One call of the ring, started again and again."""

    def once() -> None:
        operation.start().wait()

    return once


def all_reduce(bench, size: int):
    """In place, of float32; zeros, whose sum stays."""
    from mpi4py import MPI

    algorithm, array = bench.flags.algorithm, bench.buffers.zeros("array", size)
    if algorithm == "host":
        return through_host(bench, array)
    if algorithm != "mpi":
        return sums.all_reduce(ring_of(bench), array, algorithm=algorithm).run
    return lambda: bench.comm.Allreduce(MPI.IN_PLACE, [array, size // 4, MPI.FLOAT])


def through_host(bench, array):
    """Of the device: copied to the host, summed up there by MPI, copied back. What one does without hpctrain."""
    from mpi4py import MPI

    host = osu_memory.pinned(array.nbytes)

    def once() -> None:
        array.get(out=host)
        bench.comm.Allreduce(MPI.IN_PLACE, host)
        array.set(host)
        osu_memory.finish()

    return once


def reduce_scatter(bench, size: int):
    """Of `size` bytes on each rank, of which each gets a part of the sum."""
    from mpi4py import MPI

    array = bench.buffers.zeros("array", size)
    if bench.flags.algorithm == "ring":
        return by_ring(ring_of(bench).reduce_scatter(array))
    counts = [len(part) for part in split_evenly(size // 4, bench.size)]
    own = bench.buffers.zeros("own", 4 * max(counts))
    return lambda: bench.comm.Reduce_scatter([array, MPI.FLOAT], [own, counts[bench.rank], MPI.FLOAT], counts)


def all_gather(bench, size: int):
    """`size` bytes from each rank."""
    from mpi4py import MPI

    everything = bench.buffers.zeros("array", size * bench.size)
    if bench.flags.algorithm == "ring":
        return by_ring(ring_of(bench).all_gather(everything))
    return lambda: bench.comm.Allgather(MPI.IN_PLACE, [everything, size, MPI.BYTE])


def broadcast(bench, size: int):
    """From rank 0."""
    from mpi4py import MPI

    array = bench.buffers.zeros("array", size)
    return lambda: bench.comm.Bcast([array, size, MPI.BYTE])


def barrier(bench, size: int):
    if bench.flags.algorithm == "ring":
        ring = ring_of(bench)
        return lambda: ring.agree("barrier")
    return bench.comm.Barrier


# ---- with -c: wrong elements on this rank


def check_all_reduce(bench, size: int) -> int:
    array, once = bench.buffers.zeros("array", size), all_reduce(bench, size)
    osu_memory.fill(array, _pattern(size // 4) * (bench.rank + 1))
    once()
    return osu_memory.wrong(array, _total(bench, size))


def check_reduce_scatter(bench, size: int) -> int:
    once, array = reduce_scatter(bench, size), bench.buffers.zeros("array", size)
    osu_memory.fill(array, _pattern(size // 4) * (bench.rank + 1))
    once()
    part = split_evenly(size // 4, bench.size)[bench.rank]
    by_mpi = bench.flags.algorithm == "mpi"
    found = bench.buffers.held("own")[: len(part)] if by_mpi else array[part.start : part.stop]
    return osu_memory.wrong(found, _total(bench, size)[part.start : part.stop])


def check_all_gather(bench, size: int) -> int:
    once, array = all_gather(bench, size), bench.buffers.zeros("array", size * bench.size)
    whole = np.concatenate([(_pattern(size) + rank).astype(np.uint8) for rank in range(bench.size)])
    own = slice(size * bench.rank, size * (bench.rank + 1))
    osu_memory.fill(array[own], whole[own])
    once()
    return osu_memory.wrong(array, whole)


def check_broadcast(bench, size: int) -> int:
    once, array = broadcast(bench, size), bench.buffers.zeros("array", size)
    expected = _pattern(size).astype(np.uint8)
    if bench.rank == 0:
        osu_memory.fill(array, expected)
    once()
    return osu_memory.wrong(array, expected)


def _pattern(length: int) -> np.ndarray:
    """Small whole numbers, whose sums are exact."""
    return np.resize((np.arange(251) + 1).astype(np.float32), length)


def _total(bench, size: int) -> np.ndarray:
    return _pattern(size // 4) * (bench.size * (bench.size + 1) // 2)
