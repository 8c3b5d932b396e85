"""One launch by mpirun: started, asked to save, ended, and nothing of it left behind on this machine.

What one asks for with a signal is SIGUSR1, never SIGTERM: every mpirun hands the first one on to the ranks, and takes
the second one as a reason to kill them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from hpctrain.config import UsageError

MARK = (
    "HPCTRAIN_LAUNCH"  # in the environment of all processes of a launch: Open MPI puts ranks into groups of their own
)
PATIENCE = 5.0  # seconds that what outlives mpirun has to go by itself
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Mpirun:
    """How `num_ranks` ranks are started: by `given`, a command, else by the mpirun beside this Python, or in PATH.

    `goes_on`: when a rank is lost. UsageError where there is none.
    """

    def __init__(self, given: str | None, num_ranks: int, goes_on: bool = False):
        beside = Path(sys.executable).with_name("mpirun")
        words = shlex.split(given) if given is not None else [str(beside) if beside.exists() else "mpirun"]
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"--mpirun {given or words[0]}: no such program; load an MPI, or name its mpirun")
        self.command, self.environment = [*words, "-n", str(num_ranks)], dict(os.environ)
        if is_openmpi(words[0]):
            if os.getuid() == 0:  # which the user has decided already
                self.environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            if given is None and "SLURM_JOB_ID" not in os.environ and num_ranks > len(os.sched_getaffinity(0)):
                self.command.insert(1, "--oversubscribe")
            if goes_on and "--with-ft" not in words:
                self.command[1:1] = ["--with-ft", "ulfm"]

    def start(self, arguments: list[str]) -> Launch:
        """Of `python -m hpctrain` with these arguments."""
        return Launch([*self.command, sys.executable, "-m", "hpctrain", *arguments], self.environment)


class Launch:
    """Runs in a session of its own, so that an interrupt from the terminal is not for it, and ends when we end."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.mark = uuid.uuid4().hex
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**environment, MARK: self.mark},
            start_new_session=True,
            preexec_fn=library and (lambda: library.prctl(DIES_WITH_PARENT, signal.SIGTERM)),
        )

    def send(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self) -> int:
        """Returns mpirun's exit code, as a shell tells it, when no process of the launch is left here."""
        code = self.process.wait()
        self.clear(PATIENCE)
        return code if code >= 0 else 128 - code

    def clear(self, patience: float) -> None:
        """Kills what is left after so many seconds."""
        deadline = time.monotonic() + patience
        while (left := carrying(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def carrying(mark: str) -> list[int]:
    """Processes with this mark, as /proc tells; none where there is no /proc."""
    entry = f"{MARK}={mark}".encode()
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if entry in environment_of(pid)]


def environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has gone, or is somebody else's
        return []


def is_openmpi(program: str) -> bool:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in said or "OpenRTE" in said
