"""osu_latency.py and osu_bw.py beside a program in C that does the same: what Python costs between two ranks.

    python benchmarks/peers/messages.py
    python benchmarks/peers/messages.py --launch "mpirun --oversubscribe -n"  # of Open MPI

Builds messages.c by the mpicc in PATH and starts both by the launcher in turns; the same sizes, iterations, windows,
cores and huge pages. Good: the bandwidth of C from 64 KiB on, within 5 %, and a latency of 8 bytes within 1 us.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hpctrain.comm.environment import announced, wants_mpi

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # of what all benchmarks share
import figures  # noqa: E402

SHARE, MICROSECONDS = 0.95, 1.0  # what --check asks for
ITERATIONS = {"latency": (10_000, 1000), "bw": (100, 10)}  # and those before
SIZES = {"latency": (8,), "bw": (64 << 10, 256 << 10, 1 << 20, 4 << 20)}
WINDOW = 64
UNITS = {"latency": "us", "bw": "MB/s"}

HEADER = f"{'':<9}{'bytes':>9}{'Python':>16}{'C':>16}{'':>12}   interval"


def built(folder: Path) -> Path:
    """The program in C. ValueError where it cannot be."""
    if shutil.which("mpicc") is None:
        raise ValueError("there is no mpicc in PATH; load the MPI that mpi4py uses")
    program = folder / "messages"
    made = subprocess.run(["mpicc", "-O2", HERE / "messages.c", "-o", program], capture_output=True, text=True)
    if made.returncode:
        words = [line for line in made.stderr.splitlines() if "error" in line] or made.stderr.splitlines()
        raise ValueError(f"mpicc: {words[0]}")
    return program


def launch(flags, program: Path, command: list, sizes: tuple[int, ...]) -> dict[int, float]:
    """What two ranks of it print, by size; `command` has the program. ValueError with their last line else."""
    line = f"{flags.launch} 2 {shlex.join(map(str, command))}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    rows = [words for each in done.stdout.splitlines() if len(words := each.split()) == 2 and words[0].isdecimal()]
    found = {int(size): float(value) for size, value in rows if int(size) in sizes}
    if done.returncode or found.keys() != set(sizes):
        said = [each for each in (done.stderr + done.stdout).splitlines() if each.strip()] or ["nothing said"]
        how = f"exit code {done.returncode}" if done.returncode else "no figures"
        raise ValueError(f"--launch {flags.launch!r}: {program.name} on 2 ranks: {how}: {telling(said)}")
    return found


def telling(lines: list[str]) -> str:
    """The one that names a fault, of what a launcher or its ranks said; else the last."""
    named = [line for line in lines if re.search(r"\b(error|unrecognized|unknown|not found|cannot)\b", line.lower())]
    return (named or lines[-1:])[0].strip()


def by_c(flags, what: str, program: Path) -> dict[int, float]:
    """By size."""
    iterations = [max(1, each // flags.divide) for each in ITERATIONS[what]]
    return launch(flags, program, [program, what, *iterations, WINDOW, 1, *SIZES[what]], SIZES[what])


def by_python(flags, what: str) -> dict[int, float]:
    """By size."""
    iterations, warmup = (max(1, each // flags.divide) for each in ITERATIONS[what])
    script, low, high = HERE.parent / f"osu_{what}.py", SIZES[what][0], SIZES[what][-1]
    argv = [sys.executable, script, "--pin", "-i", iterations, "-x", warmup, "-m", f"{low}:{high}"]
    return launch(flags, script, argv, SIZES[what])


def measure(flags, tell) -> dict[str, list[dict]]:
    """Pairs of each size, by what is measured."""
    found: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder))
        tell(HEADER, flush=True)
        for what, sizes in SIZES.items():
            pairs = []
            for number in range(flags.pairs):
                sides = {"c": lambda what=what: by_c(flags, what, program)}
                sides["python"] = lambda what=what: by_python(flags, what)
                order = sorted(sides, reverse=bool(number % 2))
                pairs.append({side: sides[side]() for side in order})
            found[what] = [
                {"bytes": size, "pairs": [{side: pair[side][size] for side in pair} for pair in pairs]}
                for size in sizes
            ]
            tell(*(line(what, row) for row in found[what]), sep="\n", flush=True)
    return found


def compared(what: str, row: dict) -> list[float]:
    """Microseconds more than C, or the share of its bandwidth, pair by pair."""
    pairs = row["pairs"]
    if what == "latency":
        return [pair["python"] - pair["c"] for pair in pairs]
    return [pair["python"] / pair["c"] for pair in pairs]


def line(what: str, row: dict) -> str:
    medians = [statistics.median(pair[side] for pair in row["pairs"]) for side in ("python", "c")]
    values, unit = compared(what, row), UNITS[what]
    told = f"{statistics.median(values):+.2f} us" if what == "latency" else f"{statistics.median(values):.1%}"
    sides = "".join(f"{value:>11.2f} {unit:<4}" for value in medians)
    return f"{what:<9}{row['bytes']:>9}{sides}{told:>12}   {figures.told(values, 2)}"


def faults(found: dict[str, list[dict]]) -> list[str]:
    """What --check finds."""
    told = []
    for row in found["latency"]:
        if (more := statistics.median(compared("latency", row))) > MICROSECONDS:
            told.append(
                f"latency of {row['bytes']} bytes: {more:.2f} us more than C, {MICROSECONDS} was to be the most"
            )
    for row in found["bw"]:
        if (share := statistics.median(compared("bw", row))) < SHARE:
            told.append(f"bandwidth of {row['bytes']} bytes: {share:.1%} of that of C, {SHARE:.0%} was asked for")
    return told


def parse(argv: list[str], num_ranks: int = 1, rank: int = 0) -> argparse.Namespace:
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("messages.py", __doc__.splitlines()[0], 0)
    parser.add_argument("--launch", default="mpirun -n", metavar="WORDS", help="before a number; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="fewer iterations, for a try; default: 1")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if wants_mpi(os.environ):
        by = announced(os.environ).launcher
        raise ValueError(f"{by} started this, which starts its own ranks: start it as python messages.py")
    for name in ("pairs", "divide"):
        if getattr(flags, name) < 1:
            raise ValueError(f"--{name} {getattr(flags, name)}: expected a whole number >= 1")
    return flags


def main(argv: list[str]) -> int:
    if (flags := figures.settle("messages.py", parse, argv, None)) is None:
        return 2
    try:
        found = measure(flags, print)
    except ValueError as error:
        print(f"messages.py: {error}", file=sys.stderr)
        return 2
    if flags.json:
        Path(flags.json).write_text(json.dumps(found, indent=1))
    told = faults(found) if flags.check else []
    print(*told, sep="\n", end="\n" if told else "")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
