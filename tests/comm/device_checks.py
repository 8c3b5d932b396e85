"""The laws of the ring on devices, as functions that return what is wrong: an empty list where a law holds.

They are used twice: on the code as it is, and on code with a planted bug. Each is collective. `path` is "direct" or
"staged", by the switch that a user has.
"""

import random
from contextlib import contextmanager

import numpy as np

from hpctrain.comm.allreduce import all_reduce
from hpctrain.comm.device_buffer import see
from hpctrain.comm.ring import Ring
from hpctrain.comm.stream import Device
from tests.comm import checks
from tests.comm.arrays import GUARD, GUARD_ITEMS, same, share
from tests.comm.stand_in import GuardedComm, StandIn

NUMBER = 1  # of the device; 0 is the current one
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


def library_for(path: str, seed: int, looks: int = 3) -> StandIn:
    """The device's library; MPI may touch its memory on the direct path only."""
    return StandIn(seed, looks, is_for_mpi=path == "direct")


class OnDevice:
    """`values` on the device, between guards, as a caller has it who computes on a stream of his own."""

    def __init__(self, library: StandIn, device: Device, values: np.ndarray, dtype: str):
        edge = np.full(GUARD_ITEMS * values.dtype.itemsize, GUARD, np.uint8).view(values.dtype)
        self._memory = library.array(np.concatenate([edge, values, edge]))
        self.array = self._memory[GUARD_ITEMS : GUARD_ITEMS + len(values)]
        self.buffer = see(self.array, device, dtype if dtype == "bfloat16" else None)
        self._library, self._there = library, library.cuda.Device(NUMBER)
        with self._there:
            self._stream = library.cuda.Stream()

    @contextmanager
    def computing(self):
        """What the library is told within is done on the caller's stream."""
        with self._there, self._stream:
            yield

    def compute(self, function) -> None:
        """Tells the caller's stream to do `function(array)`."""
        with self.computing():
            function(self.array)

    def fill(self, values: np.ndarray) -> None:
        """The caller's stream computes these, later."""
        computed = self._library.array(values)
        self.compute(lambda array: array.__setitem__(slice(None), computed))

    def run(self, call) -> None:
        """Starts and waits, from the caller's stream."""
        with self.computing():
            call.start()
        call.wait()

    def guards_untouched(self) -> bool:
        edges = self._memory.host[:GUARD_ITEMS], self._memory.host[len(self._memory) - GUARD_ITEMS :]
        return all(np.all(edge.view(np.uint8) == GUARD) for edge in edges)


def equal_to_host(comm, path, dtype, lengths, *, operation="all_reduce", segment_bytes=1 << 20, seed=0, divisor=1.0):
    """The bits that the ring makes on the host; nothing beside the array is touched; the order of work is right.

    Of bfloat16, for which the host's ring needs torch, the bits of the oracle.
    """
    library = library_for(path, seed)
    guarded, device = GuardedComm(comm, library), Device(library, NUMBER)
    ring = Ring(guarded, segment_bytes=segment_bytes)
    problems = []
    for length in lengths:
        shares = [share(dtype, length, rank, seed) for rank in range(comm.size)]
        own = shares[comm.rank].copy()
        there = OnDevice(library, device, np.zeros_like(own), dtype)
        there.fill(own)
        call = getattr(ring, operation)(there.buffer)
        call.divisor = divisor
        there.run(call)
        if dtype == "bfloat16":
            own, _ = checks.wanted(dtype, shares, "random", operation, comm.rank)
        else:
            call = getattr(ring, operation)(own)
            call.divisor = divisor
            call.run()
        seen = np.zeros_like(own)
        copy = library.array(seen)
        there.compute(lambda array, copy=copy: copy.__setitem__(slice(None), array))
        library.finish()
        part = checks.chunk_slices(length, comm.size)[comm.rank] if operation == "reduce_scatter" else slice(None)
        where = f"{operation} of {dtype} x {length}, {path}"
        if not same(copy.host[part], own[part], dtype):
            problems.append(f"{where}: {copy.host[part][:20]} instead of {own[part][:20]}")
        if not there.guards_untouched():
            problems.append(f"{where}: memory beside the array was changed")
    ring.close()
    return problems + library.problems + _uncounted(ring, path, guarded, sum(lengths) > 0)


def _uncounted(ring, path: str, guarded: GuardedComm, is_something: bool) -> list[str]:
    """The path taken is the one counted, and the other's counter stays zero."""
    counters = ring.counters
    counted = {"direct": counters.direct_bytes, "staged": counters.staged_bytes}
    moved = counted.pop(path)
    problems = [f"bytes that went another way are counted: {counted}"] if any(counted.values()) else []
    if ring.size > 1 and is_something and not 0 < moved <= counters.bytes_sent:
        problems.append(f"{moved} bytes were {path}, of {counters.bytes_sent}")
    if (guarded.num_of_device > 0) != (path == "direct" and ring.size > 1):
        problems.append(f"MPI got memory of the device {guarded.num_of_device} times, {path}")
    return problems


def random_program(comm, path, seed, num_actions=30, segment_bytes=200, looks=4) -> list[str]:
    """Three arrays, each computed on by a stream of its own; calls begin right after, several are under way.

    All ranks draw the same program; in what order a rank polls its calls it draws itself.
    """
    library = library_for(path, seed + comm.rank, looks)
    device, own = Device(library, NUMBER), random.Random(seed * 31 + comm.rank)
    ring = Ring(GuardedComm(comm, library), segment_bytes=segment_bytes)
    drawn = random.Random(seed)
    dtypes = [drawn.choice(["float64", "float32", "int32"]) for _ in range(3)]
    values = [share(dtype, drawn.choice([0, 5, 100, 333]), comm.rank, seed, "whole") for dtype in dtypes]
    arrays = [OnDevice(library, device, each, dtype) for each, dtype in zip(values, dtypes, strict=True)]
    under_way: dict[int, object] = {}
    for _ in range(num_actions):
        which, operation, factor = drawn.randrange(3), drawn.choice(OPERATIONS), drawn.randint(1, 3)
        if which in under_way:
            while not under_way[which].poll():
                own.choice(list(under_way.values())).poll()
            del under_way[which]
        elif drawn.random() < 0.5:
            for host in (False, True):
                _step(values[which], factor) if host else arrays[which].compute(lambda a, f=factor: _step(a, f))
        else:
            getattr(ring, operation)(values[which]).run()
            with arrays[which].computing():
                under_way[which] = getattr(ring, operation)(arrays[which].buffer).start()
            if operation == "reduce_scatter":  # what it leaves elsewhere is nobody's to look at
                ring.all_gather(values[which]).run()
                under_way[which].wait()
                with arrays[which].computing():
                    under_way[which] = ring.all_gather(arrays[which].buffer).start()
    for call in under_way.values():
        call.wait()
    for array in arrays:
        array.compute(lambda a: _step(a, 2))
    ring.close()
    library.finish()
    for each in values:
        _step(each, 2)
    problems = [
        f"array {which} ({dtype}) differs from the host's"
        for which, (each, array, dtype) in enumerate(zip(values, arrays, dtypes, strict=True))
        if not same(array.array.host, each, dtype)
    ]
    return [f"seed {seed}, {path}: {problem}" for problem in problems + library.problems]


def _step(array, factor: int) -> None:
    """A kernel: reads and writes the whole array."""
    np.multiply(array, array.dtype.type(factor), out=array)
    np.add(array, array.dtype.type(1), out=array)


def many_segments(comm, path, seed) -> list[str]:
    """More segments than there are slots for."""
    return equal_to_host(comm, path, "float64", [400], segment_bytes=64, seed=seed)


def used_at_once(comm, path, seed) -> list[str]:
    """What a rank gets by work alone is read as soon as the call is done."""
    return equal_to_host(comm, path, "float64", [1000], operation="reduce_scatter", seed=seed)


def summed_on_host(comm, path, seed) -> list[str]:
    """An algorithm that knows of the host only: its bits, read by the caller's stream when the call is done."""
    library = library_for(path, seed)
    device, ring = Device(library, NUMBER), Ring(comm)
    values = share("float64", 300, comm.rank, seed)
    there = OnDevice(library, device, np.zeros_like(values), "float64")
    there.fill(values)
    there.run(all_reduce(ring, there.buffer, "", "doubling"))
    seen = library.array(np.zeros_like(values))
    there.compute(lambda array: seen.__setitem__(slice(None), array))
    all_reduce(ring, values, "", "doubling").run()
    ring.close()
    library.finish()
    return library.problems + ([] if same(seen.host, values, "float64") else [f"{path}: other numbers than the host's"])
