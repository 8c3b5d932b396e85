"""`python -m tests.soak.damages --count 1000`: checkpoints are changed at random, and loaded by the way of --resume.

What was changed by accident is found by its sha256. An attacker writes the sha256 anew, of the manifest and of a file:
then what it says is of a wrong kind, too large, elsewhere, or not there. Whatever it is, it is refused in one line that
names the checkpoint, and nothing of it was taken over; or it is taken, and training goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config, UsageError
from hpctrain.plan.grid import grid_of
from hpctrain.tasks.load import build_task
from hpctrain.train import checkpoint_files as files
from hpctrain.train.build import build_executor
from hpctrain.train.checkpoint import Checkpoints
from hpctrain.train.checkpoint_pieces import Piece, described, stored
from hpctrain.train.errors import AgreedError
from hpctrain.train.layout import settled
from hpctrain.train.resume import find, parse_resumed
from hpctrain.train.trainer import Trainer
from tests.harness.launch import ROOT
from tests.soak.forgeries import WAYS, damaged_bytes, harmless

TASKS = {
    "masked": {"task": f"{ROOT}/tests/train/toys.py:Masked", "optimizer": "adam"},
    "mixing": {"task": f"{ROOT}/tests/train/toys.py:Mixing", "optimizer": "adagrad"},
    "recommender": {"task": f"{ROOT}/tests/train/recommender.py:Recommender", "optimizer": "momentum", "lr": 0.01},
}
REFUSED = (AgreedError, UsageError, files.CheckpointError)


class Run:
    """Of one process, in a folder of its own: built as hpctrain does, not trained yet."""

    def __init__(self, name: str, root: Path):
        how = {"steps": 50, "precision": "float64", "global_batch_size": 9, "threads": 1, **TASKS[name]}
        config = settled(Config(**how), 1)
        self.root, self.mesh = root / name, Mesh(None, grid_of(1, 1))
        self.executor = build_executor(config, build_task(config.task, {}, None), self.mesh)
        self.trainer = Trainer(config, self.executor, self.mesh, lambda line: None)
        self.saving = Checkpoints(self.root / "checkpoints", config, self.executor, self.mesh)

    def step(self, number: int) -> None:
        last = self.trainer.state.step + number
        while self.trainer.state.step < last:
            self.trainer._run_until(last)

    def load(self, checkpoint: Path) -> None:
        """As a run that goes on does; it must take this one."""
        argv = ["--resume", "auto", "--run-dir", str(self.root)]
        start = find(argv, self.mesh.world)
        assert start.checkpoint == checkpoint, "it was not looked at"
        parse_resumed(argv, start, 1)
        self.trainer.state = self.saving.load(start.checkpoint, start.manifest)
        self.executor.batches.sampler.begin_at(self.trainer.state.step, self.trainer.state.rows)

    def bits(self) -> bytes:
        """Of all that a load may change."""
        digest = hashlib.sha256(repr((self.executor.update.items_seen, self.trainer.state.step)).encode())
        for piece in self.saving.state.pieces():
            digest.update(piece.key.encode() + piece.values.numpy(force=True).tobytes())
        return digest.digest()


class Subject(Run):
    """One that has saved, its tensors cut into pieces in two files."""

    def __init__(self, name: str, root: Path):
        super().__init__(name, root)
        self.step(3)
        self.whole = self.cut(self.saving.save(self.trainer.state))
        self.kept, self.good = root / f"{name}.kept", self.bits()
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self.whole, self.kept)

    def cut(self, folder: Path) -> Path:
        """The same checkpoint, as several ranks would have written it."""
        manifest, halves = files.read_manifest(folder), ([], [])
        for piece in self.saving.state.pieces():
            flat, middle = piece.values.reshape(-1), piece.values.numel() // 2
            if middle == 0 or piece.key.startswith("tables/"):
                halves[0].append(piece)
                continue
            halves[0].append(Piece(piece.key, piece.shape, 0, flat[:middle]))
            halves[1].append(Piece(piece.key, piece.shape, middle, flat[middle:]))
        part = files.begin(folder.parent, 3)
        written = [
            files.write_tensors(part, f"rank-{i:04d}.safetensors", stored(half)) for i, half in enumerate(halves)
        ]
        known = {key: value for key, value in manifest.items() if key not in ("files", "format")}
        return files.seal(part, {**known, "contents": [described(half) for half in halves]}, written)

    def restore(self) -> None:
        shutil.rmtree(self.whole)
        shutil.copytree(self.kept, self.whole)


def trains(subject: Subject) -> None:
    """A new process takes the same checkpoint, and makes a step."""
    run = Run(subject.root.name, subject.root.parent)
    run.load(subject.whole)
    run.step(1)
    run.executor.batches.close()
    run.mesh.close()


def one(subject: Subject, rng: random.Random) -> str:
    """Changes the checkpoint, loads it, and puts it right again. AssertionError where that is not good."""
    (way,) = rng.choices(list(WAYS), weights=list(WAYS.values()))
    how, before = way(subject.whole, rng), subject.bits()
    try:
        subject.load(subject.whole)
        came = "loaded"
    except REFUSED as error:
        came, told = "refused", str(error)
        assert way is not harmless, f"{how}: {told}"
        named = str(subject.whole) in told or isinstance(error, UsageError) and told.startswith("--")
        assert named, f"{how}: no name of a file: {told}"
        short = len(told) < 1000 or isinstance(error, UsageError)  # which says again what was given
        assert "\n" not in told and short, f"{how}: more than a line: {told}"
        assert subject.bits() == before, f"{how}: partly loaded: {told}"
    except Exception as error:
        raise AssertionError(f"{how}: {type(error).__name__}: {error}") from error
    if came == "loaded":
        assert way is not damaged_bytes or subject.bits() == subject.good, f"{how}: loaded"
        assert way is not harmless or subject.bits() == subject.good, f"{how}: loaded something else"
        try:
            trains(subject)
        except Exception as error:
            raise AssertionError(f"{how}: loaded, and the next step: {type(error).__name__}: {error}") from error
    subject.restore()
    return f"{way.__name__} {came}"


def damage(count: int, seed: int, root: Path) -> tuple[Counter, list[str]]:
    """How often what came of it, and all that was not good."""
    found, faults = Counter(), []
    for number, name in enumerate(TASKS):
        subject, rng = Subject(name, root), random.Random(f"{seed} {name}")
        for turn in range(len(range(number, count, len(TASKS)))):
            try:
                found[one(subject, rng)] += 1
            except AssertionError as error:
                faults.append(f"{name}, turn {turn} of seed {seed}: {error}")
                shutil.rmtree(subject.root, ignore_errors=True)
                subject = Subject(name, root)
        subject.mesh.close()
    return found, faults


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.damages", description=__doc__)
    for flag, default in (("--count", 1000), ("--seed", 1)):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found, faults = damage(flags.count, flags.seed, Path(folder))
    print(*(f"{number} {what}" for what, number in sorted(found.items())), sep=", ")
    print(*faults[:20], f"{flags.count} checkpoints, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
