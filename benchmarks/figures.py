"""What benchmarks share: flags whose mistakes are one line, intervals of medians, one core for each rank. No torch."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable

from hpctrain.comm.environment import cores_allowed
from hpctrain.comm.start import join_launch

CERTAINTY = 0.95  # of an interval, where there are values enough


class Flags(argparse.ArgumentParser):
    """Raises its errors, and lets rank 0 alone print help."""

    def __init__(self, prog: str, description: str, rank: int):
        super().__init__(prog=prog, description=description)
        self.rank = rank

    def error(self, message: str) -> None:
        raise ValueError(message.removeprefix("argument "))

    def print_help(self, file=None) -> None:
        if self.rank == 0:
            super().print_help(file)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Between which two of the values the true median lies, and with what probability, however they are spread."""
    ordered, size = sorted(values), len(values)
    if size == 1:
        return ordered[0], ordered[0], 0.0
    inside, cut = 1 - 2 / 2**size, 1
    while cut < size // 2 and (fewer := inside - 2 * math.comb(size, cut) / 2**size) >= CERTAINTY:
        inside, cut = fewer, cut + 1
    return ordered[cut - 1], ordered[-cut], inside


def pin(rank: int) -> int:
    """A core of its own for this rank, where there are enough, and one thread of torch; how many cores there are."""
    cores = cores_allowed()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    return len(cores)


def main(name: str, parse: Callable, run: Callable, argv: list[str]) -> int:
    """`run(flags, comm, tell)` on all ranks gives figures and faults; the exit code, the same on all. Collective."""
    comm = join_launch()
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    try:
        flags = parse(argv, size, rank)
    except ValueError as error:
        if rank == 0:
            print(f"{name}: {error}", file=sys.stderr)
        return 2
    figures, faults = run(flags, comm, print if rank == 0 else lambda *words, **how: None)
    if rank == 0:
        if flags.json:
            with open(flags.json, "w", encoding="utf-8") as file:
                json.dump({"flags": vars(flags), **figures}, file, indent=1)
        print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0
