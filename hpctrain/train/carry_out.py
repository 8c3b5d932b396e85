"""A run in the layout that is asked for: replicas, pipelines, or workers with servers, on the ranks that are there."""

from pathlib import Path

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.roles import Roles
from hpctrain.config import Config
from hpctrain.plan.tuning import Tuning
from hpctrain.train.layout import grid_of
from hpctrain.train.resume import Start
from hpctrain.train.signals import StopSignals


def carry_out(
    config: Config,
    folder: Path,
    comm,
    start: Start,
    mesh: Mesh | None = None,
    *,
    device: int | None = None,
    tuning: Tuning,
    signals: StopSignals,
) -> int:
    """Trains on the ranks of `comm`; returns the exit code. Collective.

    `device` is the number of the one that this rank computes on, None: the host.
    `mesh`: of all these ranks as replicas, which is taken, or closed. Ranks that may be lost share no memory: MPI could
    not take it back.
    """
    if mesh is not None and (config.servers or config.stages > 1 or config.tuning is not None):
        mesh.close()
        mesh = None
    if config.servers:
        return with_servers(config, folder, comm, device, tuning, start, signals)
    if mesh is None:
        grid = grid_of(config, 1 if comm is None else comm.size)
        mesh = Mesh(comm, grid, progress=progress_of(start), tuning=tuning, shares_memory=start.survival is None)
    # torch comes in here, after MPI and after every mistake that needs neither
    from hpctrain.train.run import run_training

    with mesh:
        return run_training(config, folder, mesh, start=start, signals=signals, device=device)


def with_servers(
    config: Config, folder: Path, comm, device: int | None, tuning: Tuning, start: Start, signals: StopSignals
) -> int:
    """Trains on all ranks but the last, which serve. Collective."""
    with Roles(comm, config.servers, progress_of(start)) as roles:
        if roles.is_server:
            from hpctrain.train.serve import serve

            return serve(config, folder, roles, signals, start.survival)
        from hpctrain.train.run import run_training

        shares = start.survival is None
        with Mesh(roles.peers, progress=roles.progress, tuning=tuning, shares_memory=shares) as mesh:
            return run_training(config, folder, mesh, roles, start, signals, device)


def progress_of(start: Start):
    """One that tells of lost ranks, where the others go on without them."""
    return None if start.survival is None else start.survival.progress()
