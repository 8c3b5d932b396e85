"""`python -m tests.soak.losses --runs 20`: ranks of runs that go on without them are killed at random moments.

Needs Open MPI. Each run is killed a rank, or two, some while a checkpoint is written. It must end by itself with 0, and
where all ranks meet in each step its losses are those of one process. Told are the seconds from a kill to the next
step that was made.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.harness.launch import ROOT, mpirun, run_python, vendor
from tests.soak.job import Clock, Job, kill, losses, num_lines

STEPS, GONE = 300, 240.0
MITIGATION = ("--with-ft", "ulfm")
TASK = ("--task", f"{ROOT}/tests/train/toys.py:Masked", "--precision", "float64")
FLAGS = (*TASK, "--batch-size", "26", "--steps", str(STEPS), "--lr-schedule", "cosine", "--threads", "1")
SAVES = ("--checkpoint-every", "10")
LAYOUTS = (  # ranks, of which the last serve; flags
    (4, 0, ()),
    (4, 0, (*SAVES, "--checkpoint-async", "--eval-every", "7")),
    (4, 0, (*SAVES, "--bucket-bytes", "200")),
    (5, 1, SAVES),
    (5, 2, ()),
    (5, 1, ("--update", "worker", *SAVES)),
    (5, 2, ("--staleness", "2", *SAVES)),
    (5, 1, ("--staleness", "inf")),
)


def argv(*flags) -> list[str]:
    return ["-m", "hpctrain", *FLAGS, *map(str, flags)]


def lose(seed: int, folder: Path, alone: dict[int, float]) -> str:
    """One run; returns a line about it. AssertionError where it did not go on as it should."""
    rng = random.Random(seed)
    ranks, servers, flags = LAYOUTS[seed % len(LAYOUTS)]
    flags = ("--on-rank-loss", "continue", *(("--servers", servers) if servers else ()), *flags)
    run, waited, num_kills = folder / "run", [], rng.choice((1, 2))
    workers = list(range(ranks - servers))
    with Job(ranks, [sys.executable, *argv(*flags, "--run-dir", run)], folder / "out", MITIGATION) as job:
        for _ in range(num_kills):
            lines = num_lines(run) + rng.randrange(1, STEPS // 6)
            if not job.wait(lambda lines=lines: num_lines(run) >= lines):
                break
            time.sleep(rng.uniform(0, 0.1))
            victim = workers.pop(rng.randrange(len(workers)))
            clock, before = Clock(), num_lines(run)
            kill(job.ranks()[victim])
            if job.wait(lambda before=before: num_lines(run) > before + 1):  # one may have been on its way
                waited.append(clock())
        job.gone(GONE)
        told = job.told()
    assert job.process.returncode == 0, f"exit code {job.process.returncode}\n{told}"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["done"] and len(summary["lost_ranks"]) == len(waited), told
    found = losses(run)
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    if "--staleness" not in flags:
        wrong = [step for step, loss in found if abs(loss - alone[step]) > 1e-9 * abs(alone[step])]
        assert not wrong, f"steps {wrong[:5]} differ\n{told}"
    return f"seed {seed}: lost {summary['lost_ranks']}, {STEPS - len(found)} lines missing; went on after " + (
        ", ".join(f"{each:.1f} s" for each in waited)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.losses", description=__doc__)
    for flag, default in (("--runs", 16), ("--seed", 0)):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")
    options, failed = parser.parse_args(), 0
    if vendor(mpirun()[0]) != "Open MPI":
        print("nothing to do: of the MPIs here only Open MPI goes on without a rank")
        return 0
    with tempfile.TemporaryDirectory() as name:
        result = run_python(*argv("--run-dir", Path(name, "alone")), timeout=GONE)
        assert result.returncode == 0, result
        alone = dict(losses(Path(name, "alone")))
        for seed in range(options.seed, options.seed + options.runs):
            folder = Path(name, str(seed))
            folder.mkdir()
            try:
                print(lose(seed, folder, alone), flush=True)
            except AssertionError as error:
                failed += 1
                print(f"seed {seed}: FAILED: {error}", flush=True)
    print(f"{options.runs} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
