"""What benchmarks share: flags whose mistakes are one line, intervals of medians, one core for each rank. No torch."""

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import absent

from hpctrain.comm import abort
from hpctrain.comm.environment import cores_allowed
from hpctrain.comm.start import join_launch

CERTAINTY = 0.95  # of an interval, where there are values enough


class Refused(ValueError):
    """What all ranks refuse alike, in one line that names the flag."""


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


def check_packages(names: tuple[str, ...]) -> None:
    """ValueError for one that is not installed; nothing is imported, which takes seconds."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed; {absent.CURES[name]}")


def check_files(flags) -> None:
    """ValueError where what --json and --plot name cannot be written. For the rank that writes; leaves nothing."""
    plot = getattr(flags, "plot", None)
    if plot is not None:
        _check_picture(plot)
    for flag, file in (("--json", getattr(flags, "json", None)), ("--plot", plot)):
        if file is None:
            continue
        there = os.path.exists(file)
        try:
            with open(file, "ab"):
                pass
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{flag} {file}: {why}; expected a file in a folder that can be written to") from None
        if not there:
            os.remove(file)


def _check_picture(file: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot: matplotlib is not installed; pip install "hpctrain[report]"')
    from matplotlib.figure import Figure

    known = sorted(Figure().canvas.get_supported_filetypes())
    if Path(file).suffix[1:].lower() not in known:
        raise ValueError(f"--plot {file}: expected a name that ends in one of .{', .'.join(known)}")


def check_memory(flag: str, nbytes: int, comm) -> None:
    """Refused where the ranks of a host would hold more than it has free; `nbytes` are this rank's. Collective."""
    told = comm.allgather((os.uname().nodename, nbytes, _bytes_free()))
    for host in dict.fromkeys(name for name, _, _ in told):
        wanted, free = zip(*((each, left) for name, each, left in told if name == host))
        if sum(wanted) > min(free):
            raise Refused(
                f"{flag}: {len(wanted)} ranks on {host} would hold {sum(wanted) / 2**30:.1f} GiB, "
                f"and {min(free) / 2**30:.1f} are free; expected fewer bytes or ranks"
            )


def _bytes_free() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else math.inf


def interval(values: list[float]) -> tuple[float, float, float]:
    """Between which two of the values the true median lies, and with what probability, however they are spread."""
    ordered, size = sorted(values), len(values)
    if size == 1:
        return ordered[0], ordered[0], 0.0
    inside, cut = 1 - 2 / 2**size, 1
    while cut < size // 2 and (fewer := inside - 2 * math.comb(size, cut) / 2**size) >= CERTAINTY:
        inside, cut = fewer, cut + 1
    return ordered[cut - 1], ordered[-cut], inside


def told(values: list[float], digits: int) -> str:
    """Their interval, in words; one value has none."""
    if len(values) == 1:
        return "one pair, so no interval"
    low, high, inside = interval(values)
    return f"{inside:.0%} from {low:.{digits}f} to {high:.{digits}f}"


def pin(rank: int) -> int:
    """A core of its own for this rank, where there are enough, and one thread of torch; how many cores there are."""
    cores = cores_allowed()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    return len(cores)


def join(name: str):
    """The communicator of all ranks, None for one that is alone; a line and code 2 where MPI cannot start."""
    try:
        return join_launch()
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        abort.leave(2)


def settle(name: str, parse: Callable, argv: list[str], comm, needs: tuple[str, ...] = ()):
    """The flags; None where a rank refuses them, which rank 0 tells, or who is alone. Collective."""
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    flags, problem = None, None
    try:
        flags = parse(argv, size, rank)
        check_packages(needs)
        if rank == 0:
            check_files(flags)
    except ValueError as error:
        problem = str(error)
    problems = comm.allgather(problem) if comm is not None else [problem]
    told = next((each for each in problems if each), None)
    if told and rank == 0:
        print(f"{name}: {told}", file=sys.stderr)
    return None if told else flags


def main(name: str, parse: Callable, run: Callable, argv: list[str], needs: tuple[str, ...] = ("torch",)) -> int:
    """`run(flags, comm, tell)` on all ranks gives figures and faults; the exit code, the same on all. Collective.

    `needs`: packages that only `run` imports, so that flags are refused before that.
    """
    comm = join(name)
    if (flags := settle(name, parse, argv, comm, needs)) is None:
        return 2
    rank = comm.rank
    try:
        figures, faults = run(flags, comm, print if rank == 0 else lambda *words, **how: None)
    except Refused as error:
        if rank == 0:
            print(f"{name}: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        if flags.json:
            with open(flags.json, "w", encoding="utf-8") as file:
                json.dump({"flags": vars(flags), **figures}, file, indent=1)
        print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0
