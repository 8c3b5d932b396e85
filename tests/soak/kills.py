"""`python -m tests.soak.kills --chains 10 --length 30`: a rank of a run is killed, and the same command given again.

A chain gives the command of a small run `length` times and kills a random rank at a random moment, each third time
while a checkpoint is written; the last start is left alone. Each time the job must be gone at once and the newest
checkpoint be whole; at the end the weights and all losses are those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.train import checkpoint_files as files
from tests.harness.launch import ROOT
from tests.harness.leftovers import remove_shared_memory, shared_memory
from tests.soak.job import Job, kill, losses, num_lines

GONE = 10.0  # seconds from the kill, the promise
EVERY = 10  # steps between two checkpoints
STEPS = 4 * EVERY  # of the run, for each kill: more than it makes between two of them
LONGEST_WAIT = 0.15  # seconds between the moment that was waited for and the kill: some steps, or most of a save
FLAGS = (
    *("--task", f"{ROOT}/tests/train/toys.py:Masked", "--task-option", "dropout=0.3", "--precision", "float64"),
    *("--batch-size", "13", "--optimizer", "adam", "--lr-schedule", "cosine", "--threads", "1"),
)


@dataclass
class Counts:
    """What a chain came to."""

    kills: int = 0
    in_saves: int = 0  # of them: a checkpoint was left half written
    latest: float = 0.0  # the longest that a job needed to be gone
    steps: list[int] = field(default_factory=list)  # of the newest checkpoint after each kill

    def __str__(self) -> str:
        return f"{self.kills} kills, {self.in_saves} left a save half done; gone after {self.latest:.1f} s at most"


class Chain:
    """One run below `folder`, of `length` kills drawn by `seed`."""

    def __init__(self, folder: Path, ranks: int, length: int, seed: int):
        self.folder, self.ranks, self.length = folder, ranks, length
        self.rng, self.run, self.counts = random.Random(seed), folder / "run", Counts()
        self.checkpoints = self.run / "checkpoints"

    def start(self, run: Path) -> Job:
        how = ("--steps", STEPS * self.length, "--checkpoint-every", EVERY, "--resume", "auto", "--run-dir", run)
        return Job(self.ranks, [sys.executable, "-m", "hpctrain", *FLAGS, *how], self.folder / "output")

    def undisturbed(self, run: Path) -> tuple[str, list[tuple[int, float]]]:
        """One start, to its end: what the weights are, and the losses."""
        with self.start(run) as job:
            job.wait(lambda: False, limit=300 + 2 * STEPS * self.length)
            job.gone(GONE)
            assert job.process.returncode == 0, f"exit code {job.process.returncode}\n{job.told()}"
        return json.loads((run / "summary.json").read_text())["weights_sha256"], losses(run)

    def __call__(self) -> Counts:
        """AssertionError where something is not as it should be."""
        for number in range(self.length):
            with self.start(self.run) as job:
                self.disturb(job, in_save=number % 3 == 2)
            self.look()
        weights, told = self.undisturbed(self.run)
        wanted_weights, wanted = self.undisturbed(self.folder / "whole")
        assert [step for step, _ in told] == list(range(1, STEPS * self.length + 1)), "each step once"
        assert told == wanted and weights == wanted_weights, "another run than the undisturbed one"
        return self.counts

    def disturb(self, job: Job, in_save: bool) -> None:
        """Kills a rank when the run has come some steps further, or while it saves."""
        begin = self.newest()
        victim, steps = self.rng.randrange(self.ranks), self.rng.randint(1, 2 * EVERY - 1)
        pause, left = self.rng.uniform(0, LONGEST_WAIT), num_lines(self.run)
        assert job.wait(lambda: len(job.ranks()) == self.ranks), f"the job ended by itself\n{job.told()}"
        pid = job.ranks()[victim]
        if in_save:
            came = job.wait(lambda: any(self.checkpoints.glob(".step-*.part")), pause=0.001)
        else:
            came = job.wait(lambda: num_lines(self.run) >= begin + steps and num_lines(self.run) != left)
        assert came, f"the job ended by itself\n{job.told()}"
        time.sleep(pause)
        kill(pid)
        self.counts.latest = max(self.counts.latest, job.gone(GONE))
        self.counts.kills += 1
        self.counts.in_saves += any(self.checkpoints.glob(".step-*.part"))
        assert job.process.returncode != 0, f"exit code 0 after a kill\n{job.told()}"

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 where there is none."""
        found = files.newest_first(self.checkpoints)
        return int(files.NAME.fullmatch(found[0].name)[1]) if found else 0

    def look(self) -> None:
        """All that has the name of a checkpoint is whole, `latest` is one of them, and none was lost."""
        found = files.newest_first(self.checkpoints)
        for folder in found:
            for each in files.files_of(folder, files.read_manifest(folder)):
                files.check_file(folder, each)
        latest = self.checkpoints / files.LATEST
        assert not latest.exists() or latest.read_text().strip() in {folder.name for folder in found}, "latest"
        assert self.newest() >= max([0, *self.counts.steps]), "a checkpoint was lost"
        self.counts.steps.append(self.newest())


def chain(ranks: int, length: int, seed: int) -> Counts:
    """AssertionError, with the line that does the same again, where a chain fails."""
    before = shared_memory()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Chain(Path(folder), ranks, length, seed)()
    except (AssertionError, files.CheckpointError) as error:
        again = f"python -m tests.soak.kills --chains 1 --length {length} --ranks {ranks} --seed {seed}"
        raise AssertionError(f"{error}\nreproduce: {again}") from error
    finally:
        remove_shared_memory(before)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kills", description=__doc__)
    for flag, default in (("--chains", 10), ("--length", 30), ("--ranks", 3), ("--seed", 1)):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")
    flags, failed = parser.parse_args(argv), 0
    for seed in range(flags.seed, flags.seed + flags.chains):
        try:
            print(f"seed {seed}: {chain(flags.ranks, flags.length, seed)}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
    print(f"{flags.chains} chains, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
