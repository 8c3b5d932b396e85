"""Watches that a run gets on: what each rank is doing, in words, for the watchdog."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hpctrain.comm import abort
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.roles import Roles
from hpctrain.comm.watchdog import STALLED, Watchdog
from hpctrain.config import Config
from hpctrain.plan.schedule import Action, Op
from hpctrain.train.shard import Shard
from hpctrain.train.trainer import Trainer

SECONDS_TO_TELL = 0.5  # for what was printed to reach the launcher, which may not listen any more from then on


def watching(config: Config, folder: Path, trainer: Trainer, roles: Roles | None) -> AbstractContextManager:
    """While a rank trains. Collective: where the ranks do not share the run's folder, nobody watches."""
    mesh, group = trainer.mesh, roles.everybody if roles else trainer.mesh.world
    for left in folder.glob("stall-*.txt") if mesh.rank == 0 else ():
        left.unlink()  # of a launch before this one
    is_shared = all(mesh.world.all_gather_json(folder.exists()))
    if group.size == 1 or not is_shared:
        if mesh.rank == 0 and not is_shared:
            print(f"note: --stall-seconds has no effect: {folder} is not on all hosts", file=sys.stderr)
        return nullcontext()
    servers = range(mesh.size, group.size)

    def describe(doing) -> tuple[str, Sequence[int]]:
        if isinstance(doing, tuple):
            action, step = doing
            if action.op is Op.STEP and trainer.executor.update.gathers:  # weights that the other replicas stepped
                others = waits_for(action._replace(op=Op.REDUCE), mesh, servers)
            else:
                others = waits_for(action, mesh, servers)
            stage = f" of stage {mesh.stage}" if mesh.grid.num_stages > 1 else ""
            return f"{action}{stage}, step {step + 1}", others
        return str(doing), [rank for rank in range(mesh.size) if rank != mesh.rank]

    return Watchdog(mesh.progress, config.stall_seconds, folder, mesh.rank, group.size, describe, end)


def watching_server(config: Config, folder: Path, roles: Roles, shard: Shard | None) -> AbstractContextManager:
    """While a server serves; it waits for messages as long as it takes, so that the workers have to miss it first."""

    def describe(doing) -> tuple[str, Sequence[int]]:
        if shard is None:
            return "starting", range(roles.num_workers)
        clock = shard.clock
        slowest = [worker for worker, at in enumerate(clock.clocks) if clock.running[worker] and at == clock.min_clock]
        at = ", ".join(map(str, clock.clocks))
        return f"serving: clocks of the workers {at}; {clock.num_parked} pulls wait", slowest

    rank, size = roles.everybody.rank, roles.everybody.size
    return Watchdog(roles.progress, config.stall_seconds, folder, rank, size, describe, end, begins=False)


def waits_for(action: Action, mesh: Mesh, servers: range) -> Sequence[int]:
    """Ranks without which an action does not end; of one that computes none."""
    grid, stage, replica = mesh.grid, mesh.stage, mesh.replica
    if action.op is Op.RECV_F:
        return [grid.rank((stage - 1) % grid.num_stages, replica)]
    if action.op is Op.RECV_B:
        return [grid.rank((stage + 1) % grid.num_stages, replica)]
    if action.op is Op.REDUCE:
        return [grid.rank(stage, other) for other in range(grid.num_replicas) if other != replica]
    if action.op in (Op.AGREE, Op.TIE):
        return [rank for rank in range(mesh.size) if rank != mesh.rank]
    return servers if action.op in (Op.PULL, Op.PUSH) else ()


def end() -> None:
    time.sleep(SECONDS_TO_TELL)
    last = threading.Timer(abort.GRACE_SECONDS, os._exit, [STALLED])  # should MPI itself be what hangs
    last.daemon = True
    last.start()
    abort.end_job(STALLED)
