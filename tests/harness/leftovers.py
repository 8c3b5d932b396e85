"""What a launch may leave behind, and its removal: processes that outlive it, and shared memory that nobody uses.

Process groups are not enough: Open MPI puts its ranks into groups of their own. So every launch puts a mark into the
environment that its processes inherit, and /proc tells who carries it. Only processes with our own mark are ended.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

MARK = "HPCTRAIN_TEST_LAUNCH"
SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_", "ompi.", "osc_rdma.", "psm2_shm.")


def new_mark() -> str:
    """A mark that nothing else carries; it contains the mark of the launch that we are part of, if any."""
    return f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"


def processes(mark: str) -> list[int]:
    """Process ids that carry the mark or one of a launch within; zombies carry none."""
    return [pid for pid in _pids() if _carries(pid, f"{MARK}={mark}".encode())]


def end_processes(mark: str, patience: float) -> list[str]:
    """Wait `patience` seconds for the launch's processes to go, then kill them; what had to be killed, a line each."""
    deadline = time.monotonic() + patience
    while (remaining := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    described = [f"{pid}: {_command(pid)}" for pid in remaining]
    while remaining:
        for pid in remaining:
            _kill(pid)
        time.sleep(0.02)
        remaining = processes(mark)
    return described


def shared_memory() -> set[str]:
    """The names of MPI's segments that belong to this user."""
    if not SHARED_MEMORY.is_dir():
        return set()
    entries = [entry for entry in os.scandir(SHARED_MEMORY) if entry.name.startswith(PREFIXES)]
    return {entry.name for entry in entries if _owner(entry.path) == os.getuid()}


def remove_shared_memory(before: set[str]) -> list[str]:
    """Unlink the segments that came up since `before` and that no living process has mapped; their names."""
    removed = sorted(shared_memory() - before - _mapped())
    for name in removed:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return removed


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # the process has gone, or belongs to somebody else
        return b""


def _carries(pid: int, entry: bytes) -> bool:
    return any(variable.startswith(entry) for variable in _read(f"/proc/{pid}/environ").split(b"\0"))


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _owner(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def _mapped() -> set[str]:
    lines = (line for pid in _pids() for line in _read(f"/proc/{pid}/maps").split(b"\n") if b"/dev/shm/" in line)
    return {line.split(b"/dev/shm/")[1].split(b" ")[0].decode() for line in lines}
