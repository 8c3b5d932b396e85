"""`python -m tests.soak --ranks 4 --turns 100000`: random all-reduces, while ranks are stopped at random."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from tests.harness.launch import ROOT, Result, run_mpi

LONGEST_STOP = 0.5  # seconds, far below what counts as stalled
SECONDS_A_TURN = 0.5  # the most, on a machine that does other things too


def stop_at_random(folder: Path, seed: int, pause: float, ended: threading.Event) -> int:
    """Stops a rank for up to LONGEST_STOP seconds after each pause of up to `pause`; how often, when `ended` is set."""
    rng, count = random.Random(seed), 0
    while not ended.wait(rng.uniform(0, pause)):
        pids = [int(file.read_text()) for file in sorted(folder.glob("*.pid")) if file.read_text()]
        if not pids:
            continue
        pid = rng.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                ended.wait(rng.uniform(0, LONGEST_STOP))
            finally:
                os.kill(pid, signal.SIGCONT)
            count += 1
    return count


def soak(ranks: int, turns: int, seed: int, pause: float) -> tuple[Result, int]:
    """What the launch gave, and how often a rank was stopped."""
    ended, counts = threading.Event(), []
    with tempfile.TemporaryDirectory() as name:
        stopper = threading.Thread(target=lambda: counts.append(stop_at_random(Path(name), seed, pause, ended)))
        stopper.start()
        try:
            argv = [sys.executable, ROOT / "tests/soak/ranks.py", name, turns, seed]
            result = run_mpi(ranks, argv, timeout=60 + SECONDS_A_TURN * turns)
        finally:
            ended.set()
            stopper.join()
    return result, counts[0]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    for flag, default in (("--ranks", 4), ("--turns", 100_000), ("--seed", 1)):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")
    flags = parser.parse_args(argv)
    result, stops = soak(flags.ranks, flags.turns, flags.seed, pause=5.0)
    print(result if result.returncode else result.stdout.splitlines()[-1], f"{stops} stops", sep="\n")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
