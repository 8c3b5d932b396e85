"""Starts a program on N ranks as a user would, with a time limit, and sees that nothing of it is left running.

A launch that hangs is the fault that these tests hunt, so the limit is kept from outside: first SIGTERM to mpirun,
which tidies up after itself, then SIGKILL to everything that carries the launch's mark.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.harness.leftovers import MARK, end_processes, new_mark

TAIL = 6000  # characters of each stream that an error shows
PATIENCE = 5.0  # seconds for a launch's processes to go by themselves
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """How a launch ended; `seconds` is wall time, `returncode` mpirun's."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.returncode} after {self.seconds:.1f} s\n{_shown(self.stdout, self.stderr)}"


def run_mpi(n: int, argv, *, timeout: float, env=None, cwd=None) -> Result:
    """`mpirun -n n argv...` by the mpirun that belongs to this interpreter; `argv[0]` is a program, as sys.executable.

    `env` is added to this process's environment, a value of None removes a variable. `cwd` defaults to the repository.
    AssertionError with the output when `timeout` (seconds) is over or when processes are left running.
    """
    command = [*mpirun(), "-n", str(n), *map(str, argv)]
    return run(command, timeout=timeout, env={**launcher_env(), **(env or {})}, cwd=cwd)


def run_python(*argv, timeout: float, env=None, cwd=None) -> Result:
    """This interpreter in a process of its own, without a launcher; otherwise as `run_mpi`."""
    return run([sys.executable, *map(str, argv)], timeout=timeout, env=env, cwd=cwd)


def run(command, *, timeout: float, env=None, cwd=None, output: Path | None = None) -> Result:
    """Any command, as `run_mpi`; with `output` both streams go into that file, as they come, and into `stdout`."""
    mark, begin = new_mark(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, err = output or Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            how = {"stdout": out_file, "stderr": subprocess.STDOUT if output else err_file, "cwd": cwd or ROOT}
            in_time, returncode = _wait(command, mark, timeout, env=environment(env, mark), **how)
        left, seconds = end_processes(mark, PATIENCE if in_time else 0), time.monotonic() - begin
        result = Result(returncode, out.read_text(errors="replace"), err.read_text(errors="replace"), seconds)
    assert in_time, f"more than {timeout:g} s: {_line(command)}\n{_shown(result.stdout, result.stderr)}"
    assert not left, f"left running by {_line(command)}: {left}\n{result}"
    return result


def mpirun() -> list[str]:
    """mpirun beside this interpreter, else in PATH, with the flags that let it start more ranks than cores."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    assert program, "no mpirun beside this interpreter nor in PATH"
    return [program, "--oversubscribe"] if vendor(program) == "Open MPI" else [program]


def is_of_wheel() -> bool:
    """Whether that MPI came as a wheel, and not with the system: a wheel is not CUDA-aware."""
    return Path(sys.executable).with_name("mpirun").exists()


@functools.cache
def vendor(program: str) -> str:
    """`Open MPI` or `MPICH`, by what `mpirun --version` says."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return "Open MPI" if "Open MPI" in said or "OpenRTE" in said else "MPICH"


def launcher_env() -> dict[str, str]:
    """What ranks need in the environment: Open MPI refuses root without, and its UCX warns at each window; they share
    cores, so one thread each.
    """
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMPI_MCA_osc": "^ucx"}
    if len(mpirun()) > 1 and os.getuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def _wait(command, mark: str, timeout: float, **how) -> tuple[bool, int]:
    """Whether the command ended in time, and its exit code."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **how)
    try:
        return True, process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        end_processes(mark, PATIENCE)
        return False, process.wait(PATIENCE)
    except BaseException:  # interrupted: nothing may outlive us
        end_processes(mark, 0)
        raise


def environment(env, mark: str) -> dict[str, str]:
    """This process's, with `env` added and the launch's mark."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    merged = {**os.environ, "PYTHONPATH": path, **(env or {}), MARK: mark}
    return {name: str(value) for name, value in merged.items() if value is not None}


def _line(command) -> str:
    return " ".join(map(str, command))


def _shown(stdout: str, stderr: str) -> str:
    return f"--- stdout ---\n{stdout[-TAIL:]}\n--- stderr ---\n{stderr[-TAIL:]}"
