"""What full_disk.py starts on each rank: `mpirun -n N python full_disk_ranks.py FOLDER FAULTS SEED`.

The last line on the screen is what came of them, as JSON; exit code 1, with a line for each, where something was wrong.
"""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from mpi4py import MPI

from hpctrain import abort_on_error
from hpctrain.train import checkpoint_files as files
from hpctrain.train import command
from hpctrain.train.executor import Executor
from hpctrain.train.signals import REQUEUE
from tests.harness.launch import ROOT
from tests.soak.job import losses

STEPS, EVERY, PAGE, PAGES = 12, 2, 4096, 40  # of the run; of the small file system
KINDS = ("full", "full within", "read-only", "read-only within")
FLAGS = (
    *("--task", f"{ROOT}/tests/train/toys.py:Masked", "--precision", "float64", "--batch-size", "13", "--threads", "1"),
    *("--optimizer", "adam", "--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--resume", "auto"),
)
TOLD = re.compile(
    r"\[rank 0\] (note: no checkpoint of step \d+: (rank \d+: )?\S+: (No space left on device|Read-only file system); "
    r"the run goes on|hpctrain: (rank \d+: )?\S+: (No space left on device|Read-only file system)"
    r"|note: \S+ is saved; \S+: (No space left on device|Read-only file system)"
    r"|hpctrain: asked to stop: saved in \S+; --resume auto --run-dir \S+ goes on"
    r"|note: --resume auto: no checkpoint in \S+, so the run begins)"
)


class Disk:
    """A small file system at `place`, of this rank alone to mount; others see it too."""

    def __init__(self, place: Path):
        self.place, self.filler = place, place / "somebody-elses"
        place.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", f"size={PAGE * PAGES}", "none")

    def fill(self, rest: int) -> None:
        """Up to so many pages."""
        free = os.statvfs(self.place).f_bavail
        with contextlib.suppress(OSError):  # full before it is done: somebody saves meanwhile
            self.filler.write_bytes(b"x" * (PAGE * max(0, free - rest)))

    def freeze(self) -> bool:
        """Read-only; not while a file is being written."""
        return self._mount("-o", "remount,ro", check=False)

    def mend(self) -> None:
        self._mount("-o", "remount,rw")
        self.filler.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", self.place], check=True)

    def _mount(self, *how: str, check: bool = True) -> bool:
        return subprocess.run(["mount", *how, self.place], check=check, capture_output=True).returncode == 0


class Fault:
    """Of one run: what happens to `disk`, from the moment when step `at` begins. Rank 0 draws it."""

    def __init__(self, rng: random.Random):
        self.kind, self.rest, self.at = rng.choice(KINDS), rng.randrange(7), rng.randrange(EVERY, STEPS - 2)
        self.asks, self.pause = rng.random() < 0.25, rng.uniform(0, 0.01)
        self.disk: Disk | None = None

    def happen(self) -> None:
        if self.kind.endswith("within"):
            threading.Thread(target=self._within).start()
        elif self.kind == "full":
            self.disk.fill(self.rest)
        else:
            assert self.disk.freeze()
        if self.asks:
            os.kill(os.getpid(), signal.SIGUSR1)

    def _within(self) -> None:
        deadline = time.monotonic() + 5
        while not any(self.disk.place.glob(".step-*.part")) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(self.pause)
        if self.kind.startswith("full"):
            self.disk.fill(self.rest)
        while self.kind.startswith("read-only") and not self.disk.freeze() and time.monotonic() < deadline:
            pass

    def __str__(self) -> str:
        asked = ", asked to stop" if self.asks else ""
        return f"{self.kind} at step {self.at}, {self.rest} pages left{asked}"


def train(comm, run: Path, fault: Fault | None = None) -> tuple[int, str]:
    """Exit code, and what it said on rank 0's standard error."""
    begin, screen, said = Executor._begin_step, (sys.stdout, sys.stderr), io.StringIO()

    def begins(self, step):
        if fault is not None and comm.rank == 0 and step == fault.at:
            fault.happen()
        begin(self, step)

    sys.stdout, sys.stderr, Executor._begin_step = io.StringIO(), said, begins
    try:
        code = command.run(["--run-dir", str(run), *FLAGS], comm)
    finally:
        (sys.stdout, sys.stderr), Executor._begin_step = screen, begin
    return code, said.getvalue()


def look(code: int, said: str, fault: Fault) -> list[str]:
    """What is wrong after a run that met a fault."""
    wrong = [f"it said {line!r}" for line in said.splitlines() if not TOLD.fullmatch(line)]
    if code not in ((1, REQUEUE) if fault.asks else (0,)):
        wrong.append(f"exit code {code}")
    found = files.newest_first(fault.disk.place)
    steps = [int(files.NAME.fullmatch(each.name)[1]) for each in found]
    if not steps or steps[0] < (fault.at - fault.at % EVERY):
        wrong.append(f"there is {steps}, and step {fault.at - fault.at % EVERY} was saved before")
    try:
        for folder in found:
            for each in files.files_of(folder, files.read_manifest(folder)):
                files.check_file(folder, each)
    except files.CheckpointError as error:
        wrong.append(str(error))
    if (fault.disk.place / files.LATEST).read_text().strip() not in {each.name for each in found}:
        wrong.append("latest names none of them")
    return wrong


def weights(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


def one(comm, run: Path, fault: Fault, whole: Path) -> tuple[str, list[str]]:
    """What came of a fault, and what is wrong with it. Collective."""
    first, disk, wrong = comm.rank == 0, None, []
    if first:
        run.mkdir()
        (run / "config.toml").touch()  # so that it is the folder of a run that has not begun
        disk = fault.disk = Disk(run / "checkpoints")
    comm.barrier()
    code, said = train(comm, run, fault)
    if first:
        time.sleep(0.05 if fault.kind.endswith("within") else 0)
        wrong += look(code, said, fault)
        disk.mend()
    comm.barrier()
    code, again = train(comm, run)
    if first:
        wrong += [f"then: exit code {code}, {again}"] * (code != 0)
        if not wrong and (weights(run), losses(run)) != (weights(whole), losses(whole)):
            wrong.append("then: another run than the undisturbed one")
        disk.close()
    ended = "ended" if fault.asks else "went on"
    return f"{fault.kind}, {'failed' if 'o space' in said or 'ead-only' in said else 'saved'}, {ended}", wrong


def main(root: Path, number: int, seed: int) -> int:
    comm = MPI.COMM_WORLD
    train(comm, root / "whole")
    found, faults = Counter(), []
    for turn in range(number):
        fault = Fault(random.Random(f"{seed} {turn}"))
        came, wrong = one(comm, root / f"run-{turn}", fault, root / "whole")
        found[came] += 1
        faults += [f"fault {turn} of seed {seed}, {fault}: {each}" for each in wrong]
    faults = comm.bcast(faults)
    if comm.rank == 0:
        print(*faults, sep="\n", file=sys.stderr)
        print(json.dumps({"faults": number, "wrong": len(faults), **dict(sorted(found.items()))}))
    return 1 if faults else 0


if __name__ == "__main__":
    with abort_on_error():
        code = main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    sys.exit(code)
