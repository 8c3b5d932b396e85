"""`hpctrain launch`: mpirun, started again from the last checkpoint until the run is done.

What ended a launch is not asked of mpirun alone, which can give 0 after a crash: a run is done when it says so in its
folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from hpctrain.config import Config, Parser, UsageError
from hpctrain.launch import flags as of_train
from hpctrain.launch.mpirun import Mpirun
from hpctrain.launch.values import at_least, wrong_start

DONE, USAGE, SAVED, STALLED, LOST = 0, 2, 75, 76, 77  # exit codes of train
MEANING = {
    DONE: ", and the run is not done",
    SAVED: ", saved on request",
    STALLED: ", no rank got on",
    LOST: ", a rank was lost",
}
ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OF_A_SIGNAL = {  # that ended a rank: its number by mpirun of MPICH, as a shell has it by that of Open MPI
    **dict.fromkeys(
        (signal.SIGKILL, 128 + signal.SIGKILL), ", as where a process was killed: most often memory ran out"
    ),
    **dict.fromkeys((signal.SIGBUS, 128 + signal.SIGBUS), ", as where shared memory ran out: /dev/shm is full"),
}


def run(argv: list[str], world) -> int:
    """Returns 0 when the run is done, 75 when a signal to this process made it save, 2 for what cannot be asked for, or
    the code of the last launch.
    """
    if world is not None:
        return wrong_start("launch", world)
    own, flags = of_train.split(argv)
    try:
        told = of_train.parse_own(parser(), own)
        if told["n"] is None:
            raise UsageError("-n: say how many ranks to start, as in -n 8")
        config = of_train.checked(flags, told["n"])
        mpirun = Mpirun(told["mpirun"], told["n"], goes_on=config.on_rank_loss == "continue")
    except UsageError as error:
        say(str(error))
        return USAGE
    arguments, name = [*of_train.added(config), *flags], config.run_dir
    if name is None:
        name = new_folder(config)
        arguments += ["--run-dir", name]
        print(f"the run is in {name}", flush=True)
    return Supervisor(mpirun, arguments, Path(name), told["max_restarts"]).run()


def parser() -> Parser:
    usage = "hpctrain launch -n N [flags] -- [flags of train]"
    top = Parser("hpctrain launch", usage=usage, add_help=False, allow_abbrev=False)
    top.add_argument("-n", "-np", type=at_least(1), dest="n", metavar="N", help="ranks to start")
    restarts = "in a row without a new checkpoint, before it gives up (3)"
    top.add_argument("--max-restarts", type=at_least(0), default=3, metavar="N", help=restarts)
    top.add_argument(
        "--mpirun", metavar="COMMAND", help="with its flags, as 'mpirun --hostfile hosts'; default: mpirun"
    )
    return top


class Supervisor:
    """Of one run, in `folder`. Signals that ask it to leave reach the ranks, which save; after one nothing is started
    again. A second one ends mpirun, a third one kills.
    """

    def __init__(self, mpirun: Mpirun, arguments: list[str], folder: Path, max_restarts: int):
        self.mpirun, self.arguments, self.folder = mpirun, arguments, folder
        self.max_restarts, self.launch, self.num_heard = max_restarts, None, 0

    def run(self) -> int:
        """Returns the exit code."""
        before = {number: signal.signal(number, self._hear) for number in ASKING if not_ignored(number)}
        try:
            return self._until_done()
        finally:
            if self.launch is not None:
                self.launch.clear(0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _until_done(self) -> int:
        num_restarts, step = 0, saved_step(self.folder)
        while True:
            stamp = summary_stamp(self.folder)
            code = self._launch_once()
            if code == USAGE or code == DONE and is_done(self.folder, stamp):
                return code
            last, step = step, saved_step(self.folder)
            num_restarts = 0 if step > last else num_restarts
            ended = f"mpirun ended with exit code {code}{MEANING.get(code) or OF_A_SIGNAL.get(code, '')}"
            saved = f"the newest checkpoint is of step {step}" if step else "there is no checkpoint"
            if self.num_heard:
                say(f"asked to leave: {ended}; {saved}; with --run-dir {self.folder} it goes on")
                return code or 1
            if not self.folder.exists():
                say(f"{ended}, before the run had its folder, {self.folder}: that is not tried again")
                return code or 1
            if num_restarts == self.max_restarts:
                say(f"gives up after {num_restarts} restarts without a new checkpoint: {ended}; {saved}")
                return code or 1
            num_restarts += 1
            goes = f"goes on from step {step}" if step else "begins again"
            say(f"restart {num_restarts} of {self.max_restarts}: {ended}; {goes}")

    def _launch_once(self) -> int:
        self.launch = self.mpirun.start(self.arguments)
        if self.num_heard:  # between two launches
            self.launch.send(signal.SIGTERM)
        return self.launch.wait()

    def _hear(self, number, frame) -> None:
        self.num_heard += 1
        if self.launch is None:
            return
        if self.num_heard > 2:
            self.launch.clear(0)
        self.launch.send(signal.SIGUSR1 if self.num_heard == 1 else signal.SIGTERM)


def not_ignored(number: signal.Signals) -> bool:
    """nohup ignores SIGHUP, and that stays."""
    return signal.getsignal(number) != signal.SIG_IGN


def new_folder(config: Config) -> str:
    """In a Slurm job the one that the same job finds again."""
    task, job = config.task.rpartition(":")[2], os.environ.get("SLURM_JOB_ID")
    if job:
        return f"runs/{task}-{job}"
    base = f"runs/{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(name for name in [base, *(f"{base}-{i}" for i in range(2, 100))] if not Path(name).exists())


def saved_step(folder: Path) -> int:
    """Of the newest checkpoint; 0: there is none."""
    try:
        name = (folder / "checkpoints/latest").read_text().strip()
    except OSError:
        return 0
    step = name.removeprefix("step-")
    return int(step) if step.isdecimal() else 0


def summary_stamp(folder: Path) -> int | None:
    """When the summary was written, None: there is none."""
    try:
        return (folder / "summary.json").stat().st_mtime_ns
    except OSError:
        return None


def is_done(folder: Path, stamp: int | None) -> bool:
    """Whether a summary says so that is another one than that of `stamp`; or that of the newest checkpoint, as where
    nothing was left to train.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    is_of_newest = summary.get("steps") == saved_step(folder) != 0
    return summary.get("done") is True and (summary_stamp(folder) != stamp or is_of_newest)


def say(line: str) -> None:
    print(f"hpctrain launch: {line}", file=sys.stderr, flush=True)
