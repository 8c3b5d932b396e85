"""Processes that a rank starts beside itself: a fork while MPI runs, which may hang, and what outlives the rank.

A launcher waits for all that holds the output of its ranks, so a helper that was forgotten keeps a finished job.
"""

import os
import sys
from functools import cache, partial
from pathlib import Path

from hpctrain.comm import abort

OF_PYTHON = "multiprocessing"  # its servers end by themselves when their parent has


@cache
def watch_children(rank: int) -> None:
    """From here on, says of the first fork, on rank 0, and at the end of what is left running."""
    if rank == 0:
        os.register_at_fork(before=cache(partial(tell_of_fork, os.getpid())))
    abort.before_finalize(partial(tell_of_children, rank))


def tell_of_fork(process: int) -> None:
    """Of `process`; of those that it forked there is nothing to say."""
    if os.getpid() == process:
        print(
            "hpctrain: note: a process is forked while MPI runs, which may hang; for a DataLoader take"
            ' multiprocessing_context="forkserver", for a program subprocess.run',
            file=sys.stderr,
            flush=True,
        )


def tell_of_children(rank: int) -> None:
    left = [f"{pid} ({command})" for pid, command in children() if OF_PYTHON not in command]
    if left:
        print(
            f"hpctrain: rank {rank} ends, and the launcher waits for what it started: {', '.join(left)}",
            file=sys.stderr,
        )


def children() -> list[tuple[int, str]]:
    """Of this process, those that have not ended: their numbers and command lines; none where there is no /proc."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        found += [(int(pid), command_of(pid)) for pid in file.read_text().split()]
    return [(pid, command) for pid, command in found if command]


def command_of(pid: str) -> str:
    """Empty of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
