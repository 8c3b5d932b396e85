"""The skeleton of the OSU-style benchmarks: flags, buffers, timed iterations, and the table that scripts parse.

Names, options, defaults, header lines and columns are those of the OSU Micro-Benchmarks (Ohio State University,
mvapich.cse.ohio-state.edu/benchmarks), so that what reads theirs reads these. What they do not have comes behind: the
columns of --full, --algorithm, --buffer, --json, --plot. Nothing here imports torch unless --buffer torch asks for it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import figures
import osu_memory
from osu_flags import parse

LARGE = 8192  # bytes from which on fewer iterations are made
WIDTH = 20  # of a column


@dataclass(frozen=True)
class Test:
    """One of the benchmarks.

    `prepare(bench, size)`: what an iteration does on this rank. `values(bench, size, seconds)`: the columns of a size,
    from the seconds of each iteration on each rank; None: microseconds of a latency, the mean over all.
    `ready(bench)`: what all sizes share, before anything is measured.
    `check(bench, size)`: how many elements were wrong on this rank after an iteration with known contents.
    `latencies`: how many of them an iteration is. `arrays(n)`: how many of a size a rank holds, at most.
    `reduces`: elements are added, so they are float32. `bus(n)`: bytes that cross the bus for one of the array.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    prepare: Callable
    values: Callable | None = None
    check: Callable | None = None
    ready: Callable | None = None
    algorithms: tuple[str, ...] = ("mpi",)
    sizes: tuple[int, int] | None = (1, 4 << 20)
    iterations: tuple[int, int] = (10_000, 1000)  # of small sizes, and from LARGE on
    warmup: tuple[int, int] = (100, 10)
    latencies: int = 1
    window: int | None = None
    ranks: str = "two"  # or pairs, or any
    reduces: bool = False
    arrays: Callable[[int], int] = lambda ranks: 2
    bus: Callable[[int], float] | None = None


class Bench:
    """A test on these ranks, with these flags. The first half of the ranks begins, with `peer` in the other half."""

    def __init__(self, test: Test, flags, comm):
        self.test, self.flags, self.comm, self.window = test, flags, comm, flags.window_size
        self.rank, self.size, self.half = comm.rank, comm.size, comm.size // 2
        self.begins, self.peer = comm.rank < self.half, (comm.rank + self.half) % comm.size
        on_device = flags.memory[min(comm.rank, 1)] == "D" if flags.memory else flags.buffer == "cupy"
        self.on_close: list[Callable[[], None]] = []
        self.buffers = osu_memory.Buffers(flags.buffer, on_device, "float32" if test.reduces else "uint8")

    @property
    def nbytes(self) -> int:
        """About what a rank holds of host memory, with what a check makes on the way."""
        on_host = self.flags.buffer != "cupy"
        return on_host * self.flags.sizes[-1] * self.test.arrays(self.size) * (5 if self.flags.validation else 1)

    def counts(self, size: int) -> tuple[int, int]:
        """Warm-up and measured iterations."""
        which, flags = int(size >= LARGE), self.flags
        warmup = self.test.warmup[which] if flags.warmup is None else flags.warmup
        return warmup, self.test.iterations[which] if flags.iterations is None else flags.iterations

    def row(self, size: int) -> dict | None:
        """All figures of a size, on rank 0. Collective."""
        seconds = self.comm.gather(self._measure(size))
        wrong = self.comm.reduce(self.test.check(self, size)) if self.flags.validation else None
        if seconds is None:
            return None
        test, scale = self.test, 1e6 / self.test.latencies
        taking_part = seconds if test.ranks == "any" else seconds[: self.half]
        averages = [scale * statistics.fmean(each) for each in taking_part]
        values = test.values(self, size, seconds) if test.values else [statistics.fmean(averages)]
        row = {"size": size, **dict(zip(test.columns, values))}
        each = sorted(scale * statistics.fmean(iteration) for iteration in zip(*taking_part))
        row |= {"min": min(averages), "max": max(averages), "iterations": len(each)}
        row |= {"p50": each[len(each) // 2], "p99": each[len(each) * 99 // 100]}
        if test.bus:
            row["algbw"] = size / statistics.fmean(averages)
            row["busbw"] = row["algbw"] * test.bus(self.size)
        return row if wrong is None else {**row, "wrong": wrong}

    def _measure(self, size: int) -> list[float]:
        """Seconds of each iteration on this rank. Of a collective all ranks begin each together."""
        once, clock, barrier = self.test.prepare(self, size), time.perf_counter, self.comm.Barrier
        warmup, iterations = self.counts(size)
        for _ in range(warmup):
            once()
        barrier()
        seconds = []
        if self.test.ranks != "any" and not (self.flags.full or self.flags.json or self.flags.plot):
            began = clock()
            for _ in range(iterations):
                once()
            return [(clock() - began) / iterations]  # nothing is told of single ones
        for _ in range(iterations):
            if self.test.ranks == "any":
                barrier()
            began = clock()
            once()
            seconds.append(clock() - began)
        return seconds


# ---- what is printed


def heading(test: Test, flags, num_ranks: int) -> list[str]:
    lines = [f"# {test.title}"]
    if test.window and test.ranks == "pairs":
        lines.append(f"# [ pairs: {num_ranks // 2} ] [ window size: {flags.window_size} ]")
    names = list(test.columns) + [title for _, title in extra(test, flags)]
    if test.sizes is None:
        return [*lines, "# " + names[0] + "".join(f"{name:>{WIDTH}}" for name in names[1:])]
    return [*lines, f"{'# Size':<10}" + "".join(f"{name:>{WIDTH}}" for name in names)]


def extra(test: Test, flags) -> list[tuple[str, str]]:
    """Keys and titles of the columns that flags ask for."""
    found = []
    if flags.full:
        found += [("min", "Min Latency(us)"), ("max", "Max Latency(us)"), ("iterations", "Iterations")]
        found += [("p50", "P50(us)"), ("p99", "P99(us)")]
        found += [("algbw", "algbw(MB/s)"), ("busbw", "busbw(MB/s)")] if test.bus else []
    return found + ([("wrong", "Wrong elements")] if flags.validation else [])


def line(test: Test, flags, row: dict) -> str:
    figures = [row[name] for name in test.columns] + [row[key] for key, _ in extra(test, flags)]
    told = "".join(f"{each:>{WIDTH}d}" if isinstance(each, int) else f"{each:>{WIDTH}.2f}" for each in figures)
    return told if test.sizes is None else f"{row['size']:<10}{told}"


def main(test: Test, argv: list[str] | None = None) -> int:
    """The exit code, the same on all ranks. Collective."""
    name = f"{test.name}.py"
    comm = figures.join(name)
    flags = figures.settle(name, partial(parse, test), sys.argv[1:] if argv is None else argv, comm)
    if flags is None:
        return 2
    if flags.pin:
        figures.pin(comm.rank)
    try:
        if flags.on_device:
            osu_memory.take_device(comm.rank)
            if flags.algorithm == "mpi":
                osu_memory.check_aware(flags.asked, comm)
    except figures.Refused as error:
        return _refuse(name, error, comm)
    bench = Bench(test, flags, comm)
    try:
        figures.check_memory("--message-size", bench.nbytes, comm)
        if test.ready:
            test.ready(bench)
        rows = _measure_all(bench)
    except figures.Refused as error:
        return _refuse(name, error, comm)
    finally:
        for end in bench.on_close:
            end()
    if comm.rank == 0:
        _write(test, flags, rows, comm.size)
    return int(bool(comm.bcast(sum(row.get("wrong", 0) for row in rows))))


def _refuse(name: str, error: figures.Refused, comm) -> int:
    if comm.rank == 0:
        print(f"{name}: {error}", file=sys.stderr)
    return 2


def _measure_all(bench: Bench) -> list[dict]:
    """The rows, on rank 0, which prints each as it is done. Collective."""
    test, flags, rows = bench.test, bench.flags, []
    tell = print if bench.rank == 0 else lambda *words, **how: None
    tell(*heading(test, flags, bench.size), sep="\n", flush=True)
    for size in flags.sizes:
        if (row := bench.row(size)) is not None:
            rows.append(row)
            tell(line(test, flags, row), flush=True)
    return rows


def _write(test: Test, flags, rows: list[dict], num_ranks: int) -> None:
    if flags.json:
        with open(flags.json, "w", encoding="utf-8") as file:
            json.dump({"test": test.name, "ranks": num_ranks, "flags": vars(flags), "rows": rows}, file, indent=1)
    if flags.plot:
        osu_memory.plot(flags.plot, test.title, test.columns[0], [(row["size"], row[test.columns[0]]) for row in rows])
