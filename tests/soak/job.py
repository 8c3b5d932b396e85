"""A launch that is watched while it runs: its ranks by number, what they have written so far, and when it is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.comm.environment import announced
from tests.harness.launch import ROOT, environment, launcher_env, mpirun
from tests.harness.leftovers import end_processes, new_mark, processes

LONGEST_GAP = 0.5  # seconds between two looks; what is more, the machine was stopped
START = 300.0  # seconds in which a job must have come so far that something happens


class Clock:
    """Seconds since its making, without those for which the whole machine stood still. To be asked often."""

    def __init__(self) -> None:
        self.seconds, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, LONGEST_GAP)
        self._last = now
        return self.seconds


class Job:
    """`mpirun flags -n N argv...`, both of its streams into the file `output`; to be closed by `with`."""

    def __init__(self, ranks: int, argv, output: Path, flags: Sequence[str] = ()):
        self.mark, self.output, self.number = new_mark(), output, ranks
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*mpirun(), *flags, "-n", str(ranks), *map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(launcher_env(), self.mark),
                cwd=ROOT,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception) -> None:
        end_processes(self.mark, 0)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Process numbers by rank, of those that have begun and live."""
        found = {}
        for pid in processes(self.mark):
            try:
                pairs = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            except OSError:
                continue
            rank = announced(dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)).rank
            if rank is not None and "python" in command.split("\0")[0]:
                found[rank] = pid
        return found

    def wait(self, happened: Callable[[], object], limit: float = START, pause: float = 0.005) -> bool:
        """Until it has happened (True) or the job has ended (False). AssertionError when `limit` seconds are over."""
        clock = Clock()
        while self.process.poll() is None:
            if happened():
                return True
            assert clock() < limit, f"nothing after {limit:g} s\n{self.told()}"
            time.sleep(pause)
        return bool(happened())

    def gone(self, limit: float) -> float:
        """Seconds from now until mpirun and all that it started have ended. AssertionError when they are `limit`."""
        clock = Clock()
        while self.process.poll() is None or processes(self.mark):
            assert clock() < limit, f"still there after {limit:g} s: {processes(self.mark)}\n{self.told()}"
            time.sleep(0.01)
        return clock()

    def told(self) -> str:
        return self.output.read_text(errors="replace")[-6000:]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process of ours, which may have ended already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def losses(run: Path) -> list[tuple[int, float]]:
    """Steps with their losses, as metrics.jsonl has them, in its order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def num_lines(run: Path) -> int:
    """How far a run has come, cheaply: whole lines of its metrics."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
