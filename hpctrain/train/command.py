"""The `train` command up to the point where torch is needed: read, check, agree, lay out, make the run folder."""

import math
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from importlib import util
from pathlib import Path

from hpctrain.comm.abort import RankLost
from hpctrain.comm.environment import cores_allowed, crowding, is_mitigating, threads_per_rank
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.survivors import check_mitigation, is_due_to_loss
from hpctrain.config import Config, UsageError, parse
from hpctrain.config.combinations import allowed_changes
from hpctrain.config.idle import idle_flags
from hpctrain.plan.tuning import Tuning
from hpctrain.report.streams import PrefixedStream
from hpctrain.report.summary import counted
from hpctrain.tasks.load import absolute_name, build_task, explained, settled_options, short_name
from hpctrain.train.carry_out import carry_out
from hpctrain.train.devices import choose
from hpctrain.train.errors import AgreedError, on_first
from hpctrain.train.facts import first_of_node
from hpctrain.train.layout import grid_of, settled
from hpctrain.train.resume import ANEW, Start, find, folder_to_go_on_in, parse_resumed
from hpctrain.train.run_folder import alone_in, make_run_folder, note_processes, write_config
from hpctrain.train.same_run import changes, check_same_run
from hpctrain.train.signals import StopSignals
from hpctrain.train.survival import Survival
from hpctrain.train.tuned import tuned, tuning_notes


def run(argv: list[str], comm) -> int:
    """Trains; returns the exit code that all ranks agree on. Collective."""
    signals = StopSignals()
    try:
        with ExitStack() as held:
            return train(argv, comm, signals, held)
    except RuntimeError as error:
        if not is_mitigating(os.environ) or not is_due_to_loss(error, comm):
            raise
        raise RankLost("another rank was lost, and the run does not go on without it") from None
    finally:
        signals.close()


def train(argv: list[str], comm, signals: StopSignals, held: ExitStack) -> int:
    """As `run`; what `signals` note is obeyed after the first step, at the earliest. Rank 0 holds the run's folder."""
    mesh = Mesh(comm, shares_memory=not is_mitigating(os.environ))
    if mesh.world.size > 1:
        sys.stderr = PrefixedStream(sys.stderr, f"[rank {mesh.rank}]")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample of text may hold what a screen cannot show
    prepared: dict = {}
    try:
        on_first(mesh.world, lambda: held.enter_context(alone_in(folder_to_go_on_in(argv))))
        start = find(argv, mesh.world)
        prepared = mesh.world.broadcast_json(prepare(argv, mesh.world.size, start) if mesh.rank == 0 else None)
        fault = prepared.get("usage") or prepare_nodes(prepared["config"], mesh)
        config, device = (None, None) if fault else choose(Config(**prepared["config"]), mesh.world)
    except AgreedError as error:
        fault = str(error)
    if fault:
        if mesh.rank == 0:
            print(f"hpctrain: {fault}", file=sys.stderr)
            if "folder" in prepared and start.folder is None:
                Path(prepared["folder"]).rmdir()
        mesh.close()
        return 2
    start = replace(start, allowed=tuple(prepared["allowed"]))
    config, folder = with_threads(config, mesh), Path(prepared["folder"])
    if isinstance(sys.stderr, PrefixedStream):
        sys.stderr.log = folder / "logs" / f"rank-{mesh.rank:04d}.log"
        note_processes(folder, mesh.world)
    if mesh.rank == 0:
        if start.folder is None:
            write_config(config, folder, mesh.world.size)
            held.enter_context(alone_in(folder))
        announce(config, folder, mesh.world.size)
    carry = partial(carry_out, config, folder, device=device, tuning=Tuning.of(prepared["tuning"]), signals=signals)
    if config.on_rank_loss == "continue" and mesh.size > 1:
        seconds = config.stall_seconds if all(mesh.world.all_gather_json(folder.exists())) else math.inf
        mesh.close()
        return Survival(comm, config.servers, seconds).run(carry, folder, start, held)
    return carry(comm, start, mesh)


def announce(config: Config, folder: Path, num_ranks: int) -> None:
    """On rank 0: what really runs, in a line on the screen."""
    ranks = f"{counted(num_ranks, 'rank')} with {counted(config.threads, 'thread')}{' each' if num_ranks > 1 else ''}"
    serving = f", {config.servers} of them {'serve' if config.servers > 1 else 'serves'}" if config.servers else ""
    print(f"{short_name(config.task)}: {ranks}{serving}; files go to {folder}", flush=True)


def prepare(argv: list[str], num_ranks: int, start: Start = ANEW) -> dict:
    """On rank 0: the configuration and the run's folder, or under `usage` what is wrong with what was asked for."""
    name = ""
    try:
        config, given = parse(argv) if start.checkpoint is None else parse_resumed(argv, start, num_ranks)
        config, tuning = tuned(config, given)
        check_packages(config)
        config = settled(config, num_ranks)
        check_survivable(config, num_ranks)
        name = config.task
        num_rows, num_held_out = lengths(prepared_task(config))
        if config.epochs is not None:
            steps = steps_of(config.epochs, num_rows, config.global_batch_size, start)
            config = replace(config, steps=steps, epochs=None)
        config = replace(config, **absolute(config))
        if start.checkpoint is not None:
            check_same_run(start, config)
        folder = make_run_folder(config) if start.folder is None else start.folder
    except ValueError as error:
        return {"usage": explained(name, error) if name else str(error)}
    lines = notes(config, given, num_ranks, num_rows, num_held_out)
    lines += tuning_notes(config, tuning, given, num_ranks)
    if start.checkpoint is not None:
        lines += changes(start, config, grid_of(config, num_ranks))
    for note in lines:
        print(f"note: {note}", file=sys.stderr)
    allowed, config = allowed_changes(config), replace(config, run_dir=None, resume=None, allow_change=None)
    return {"config": asdict(config), "tuning": asdict(tuning), "folder": str(folder), "allowed": allowed}


def steps_of(epochs: int, num_rows: int, batch_size: int, start: Start) -> int:
    """Until every row was trained on so often; from where `start` is, be it by batches of another size."""
    begun, position = divmod(start.rows, num_rows)
    if begun >= epochs:
        return start.step
    return start.step - (-(num_rows - position) // batch_size) - (-num_rows // batch_size) * (epochs - begun - 1)


def absolute(config: Config) -> dict:
    """Settings that name files, as they work from any folder, and all options of the task."""
    return {
        "task": absolute_name(config.task),
        "task_option": settled_options(config.task, config.task_option),
        "aggregate": absolute_name(config.aggregate),
        "data": config.data and str(Path(config.data).absolute()),
    }


def lengths(task) -> tuple[int, int]:
    """Numbers of rows to train on and held out. ValueError where there is nothing to train on."""
    found = {}
    for split in ("train", "eval"):
        data = task.dataset(split)
        if data is None and split == "eval":
            found[split] = 0
        elif not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(f'--task: dataset("{split}") gives a {type(data).__name__}; it needs a length and rows')
        else:
            found[split] = len(data)
    if not found["train"]:
        raise ValueError('--task: dataset("train") has no rows')
    return found["train"], found["eval"]


def prepared_task(config: Config):
    """The task, its data ready for every rank of this node."""
    task = build_task(config.task, config.task_option, config.data)
    if hasattr(task, "prepare"):
        task.prepare()
    return task


def prepare_nodes(settings: dict, mesh: Mesh) -> str | None:
    """The first rank of each other node prepares the data there, the others wait. What is wrong, if anything."""
    first = first_of_node(mesh.world)
    fault = None
    if first == mesh.rank != 0:
        try:
            prepared_task(Config(**settings))
        except ValueError as error:
            error = explained(settings["task"], error)
            fault = f"on {socket.gethostname()}: {error}"
    return next(filter(None, mesh.world.all_gather_json(fault)), None)


def check_survivable(config: Config, num_ranks: int) -> None:
    """UsageError where ranks could not go on without another."""
    if config.on_rank_loss == "continue" and num_ranks > 1:
        from mpi4py import MPI

        try:
            check_mitigation(MPI.Get_library_version())
        except ValueError as error:
            raise UsageError(f"--on-rank-loss continue: {error}") from None


def check_packages(config: Config) -> None:
    """UsageError where a flag needs a package that is not there."""
    if config.tensorboard and util.find_spec("tensorboard") is None:
        raise UsageError('--tensorboard: needs the package tensorboard; pip install "hpctrain[report]"')


def notes(config: Config, given: set[str], num_ranks: int, num_rows: int, num_held_out: int) -> list[str]:
    """Lines about flags without effect and about sizes that do not fit each other."""
    lines = idle_flags(config, given, num_ranks)
    rows, replicas = config.global_batch_size, grid_of(config, num_ranks).num_replicas
    pieces = replicas * config.num_microbatches
    if config.servers and config.staleness and pieces > 1 and "lr" not in given:
        lines.append(
            f"--staleness {config.staleness:g}: each worker's push is an update of its own, {replicas} in each step;"
            f" --lr {config.lr:g} may be too large"
        )
    if config.clip_norm and config.schedule == "1f1b-async" and config.stages > 1:
        lines.append(f"--clip-norm {config.clip_norm}: --schedule 1f1b-async clips the gradients of each stage alone")
    if config.compress != "none" and replicas == 1:
        lines.append(f"--compress {config.compress} has no effect with one replica, which sums no gradients")
    if config.lr_warmup_steps >= config.steps:
        lines.append(f"--lr-warmup-steps {config.lr_warmup_steps}: the run ends before, after {config.steps} steps")
    if config.eval_every and config.eval_every > config.steps:
        lines.append(f"--eval-every {config.eval_every}: the run ends before, after {config.steps} steps")
    if not num_held_out and config.eval_every:
        lines.append(f"--eval-every {config.eval_every} has no effect: the task holds out no rows")
    if rows > num_rows:
        lines.append(f"--global-batch-size {rows}: the data has {num_rows} rows, so every update takes them all")
    if min(rows, num_rows) < pieces:
        idle = pieces - min(rows, num_rows)
        lines.append(f"--global-batch-size {rows}: {idle} of the {pieces} pieces of each update have no row to compute")
    return lines


def with_threads(config: Config, mesh: Mesh) -> Config:
    """Settles --threads, the same on all ranks, and tells the arithmetic libraries before torch is loaded."""
    places = mesh.world.all_gather_json([socket.gethostname(), cores_allowed()])
    wished = mesh.world.broadcast_json(os.environ.get("OMP_NUM_THREADS", ""))
    if config.threads is None:
        wish = int(wished) if wished.isdecimal() else 0
        config = replace(config, threads=wish or threads_per_rank(places))
    note = crowding(places, config.threads)
    if note and mesh.rank == 0:
        print(f"note: {note}", file=sys.stderr)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.threads)
    return config
