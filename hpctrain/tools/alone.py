"""What a command does on one rank while the others wait to hear how it ended."""

import os
import sys
from collections.abc import Callable

from hpctrain.comm.mesh import Mesh


def on_rank_0(world, work: Callable[[], str | None]) -> int:
    """`work()` says what is wrong, if anything, in one line. Returns 0 or 2 on all ranks. Collective."""
    with Mesh(world) as mesh:
        fault = mesh.world.broadcast_json(unless_unread(work) if mesh.rank == 0 else None)
    if fault and mesh.rank == 0:
        print(f"hpctrain: {fault}", file=sys.stderr)
    return 2 if fault else 0


def unless_unread(work: Callable[[], str | None]) -> str | None:
    """`command | head`: the reader has seen enough."""
    try:
        fault = work()
        sys.stdout.flush()
        return fault
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None
