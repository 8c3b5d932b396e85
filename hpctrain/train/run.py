"""One run from its configuration to its summary: builds the parts, lets the Trainer train, leaves the folder behind."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm.clock import Clock
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.roles import Roles
from hpctrain.config import Config
from hpctrain.model.random_state import CPU
from hpctrain.model.stage import Stage
from hpctrain.model.structure import to_device
from hpctrain.report.console import print_closing
from hpctrain.report.recorder import Recorder
from hpctrain.report.summary import write_json
from hpctrain.tasks.load import build_task
from hpctrain.train import facts
from hpctrain.train.batches import Batches
from hpctrain.train.build import build_evaluation, build_executor
from hpctrain.train.cautions import note_compression, note_mixing
from hpctrain.train.checkpoint import Checkpoints
from hpctrain.train.devices import take
from hpctrain.train.errors import AgreedError, NothingLeft, on_first
from hpctrain.train.final import final_weights, save
from hpctrain.train.process import settle
from hpctrain.train.resume import ANEW, CHECKPOINTS, Start
from hpctrain.train.run_folder import take_over, write_config
from hpctrain.train.same_run import check_data
from hpctrain.train.serve import part
from hpctrain.train.signals import StopSignals
from hpctrain.train.stall import watching
from hpctrain.train.start import raise_where_different
from hpctrain.train.stop_vote import LAG_OF_FREE, StopVote
from hpctrain.train.summarise import or_note, summarise
from hpctrain.train.tracing import Tracer
from hpctrain.train.trainer import Trainer


def run_training(
    config: Config,
    folder: Path,
    mesh: Mesh,
    roles: Roles | None = None,
    start: Start = ANEW,
    signals: StopSignals | None = None,
    device: int | None = None,
) -> int:
    """Trains on all ranks of `mesh`, from where `start` says; returns the exit code. What `signals` note ends it.

    `device` is the number of the one that this rank computes on, None: the host. Collective, also with the servers of
    `roles`.
    """
    settle(config.threads)
    home = take(device)
    task = build_task(config.task, config.task_option, config.data)
    try:
        data_sha256 = same_data(task, mesh)
        trainer = build_trainer(config, task, mesh, roles, home)
        if signals is not None:
            heed(signals, trainer)
        go_on(trainer, folder, start, data_sha256)
        if start.folder is not None and trainer.is_done and on_first(mesh.world, (folder / "summary.json").exists):
            raise NothingLeft(f"{folder} is done, at step {trainer.state.step} of {config.steps}")
    except NothingLeft as error:
        if mesh.rank == 0:
            print(f"nothing is left to train: {error}")
        return leave(0, roles)
    except AgreedError as error:
        if mesh.rank == 0:
            print(f"hpctrain: {error}", file=sys.stderr)
            if start.folder is None:
                shutil.rmtree(folder, ignore_errors=True)  # holds nothing yet, and is in the way of another try
        return leave(2, roles)
    recorder = begin_recording(trainer, folder, start, roles) if mesh.rank == 0 else None
    with watching(config, folder, trainer, roles):
        return train_to_the_end(trainer, task, recorder, folder, roles, data_sha256)


def train_to_the_end(
    trainer: Trainer, task, recorder: Recorder | None, folder: Path, roles: Roles | None, data_sha256: str | None
) -> int:
    """Trains, saves the weights, evaluates, writes the summary; returns the exit code. Collective, with servers too."""
    config, executor, mesh = trainer.config, trainer.executor, trainer.mesh
    stamp = data_stamp(task) if recorder else None
    try:
        clock = Clock(mesh.world)
        tracer = Tracer(executor) if config.trace else None
        trainer.train()
        executor.batches.close()
        mesh.progress.begin("bringing the weights together", is_patient=True)
        model, tables, weights_sha256 = final_weights(config, task, executor, mesh)
        if model is not None:
            save(model, tables, folder)
    except AgreedError as error:
        executor.batches.close()
        give_up(recorder, error)
        return leave(error.code, roles)
    if recorder:
        recorder.close()
        print("evaluating on the held-out rows", flush=True)
    hashes = {"weights_sha256": weights_sha256, "data_sha256": data_sha256}
    clock.end()
    mesh.progress.begin("the last evaluation")
    metrics = trainer.evaluate()
    mesh.progress.begin("what the ranks tell at the end", is_patient=True)
    servers = part(roles) if roles else []
    summary = summarise(config, task, trainer, mesh, hashes, clock, metrics, servers)
    summary["trace"] = tracer.write(folder / "trace.json", clock, mesh) if tracer is not None else None
    if recorder:
        if data_stamp(task) != stamp:
            print(f"note: --data {config.data}: changed or deleted since the run began", file=sys.stderr)
        leave_behind(summary, model, task, folder, launched(mesh))
    return roles.everybody.broadcast_json(0) if roles else 0


def begin_recording(trainer: Trainer, folder: Path, start: Start, roles: Roles | None) -> Recorder:
    """From here on the folder is this run's. Rank 0 only."""
    config, mesh = trainer.config, trainer.mesh
    if start.folder is not None:
        take_over(folder, trainer.state.step)
        write_config(config, folder, roles.everybody.size if roles else mesh.size)
    recorder = Recorder(folder, config.steps, launched(mesh), config.tensorboard, trainer.state.step)
    trainer.note = recorder.note
    if start.survival is not None:
        start.survival.recorder = recorder
    if trainer.last_line is not None:
        recorder.make_up(trainer.last_line)
    return recorder


def give_up(recorder: Recorder | None, error: AgreedError) -> None:
    """Rank 0, which has a recorder, says why, in a line."""
    if recorder:
        recorder.close()
        print(f"hpctrain: {error}", file=sys.stderr)


def heed(signals: StopSignals, trainer: Trainer) -> None:
    """Has all ranks leave when a signal asks one of them. Collective."""
    config, executor, mesh = trainer.config, trainer.executor, trainer.mesh
    client = getattr(executor.update, "client", None)

    def was_asked() -> bool:
        return signals.was_asked() or (client is not None and client.servers_asked)

    executor.update.is_asked_to_stop = was_asked
    if not trainer.flushes:
        executor.vote = StopVote(mesh.add_world(), lag_of(config), was_asked)


def lag_of(config: Config) -> int:
    """Steps by which some ranks are ahead of others, as a rule, where no step brings them together."""
    if not config.servers:
        return -(-config.stages // config.num_microbatches) + 1
    if config.staleness == math.inf:
        return LAG_OF_FREE
    return int(config.staleness) + config.delay + config.delay_window + 2


def go_on(trainer: Trainer, folder: Path, start: Start, data_sha256: str | None) -> None:
    """Gives the trainer its checkpoints, and what `start` says was saved. AgreedError, before anything has changed,
    where that cannot be, or where there is no room for what --checkpoint-every asks for. Collective.
    """
    config, executor, mesh = trainer.config, trainer.executor, trainer.mesh
    trainer.checkpoints = Checkpoints(folder / CHECKPOINTS, config, executor, mesh, data_sha256)
    if config.checkpoint_every is not None:
        trainer.checkpoints.check_room()
    survival = start.survival
    if survival is not None and survival.trainer is not None:
        trainer.state = survival.regain(trainer)
    elif start.checkpoint is not None:
        check_data(start, data_sha256, config.data)
        trainer.state = trainer.checkpoints.load(start.checkpoint, start.manifest)
        trainer.resumed_from = start.step
        if start.config["early_stop"] != config.early_stop:
            trainer.state.forget_best()
        if mesh.rank == 0:
            print(f"goes on from step {trainer.state.step}, saved in {start.checkpoint}", flush=True)
    executor.batches.sampler.begin_at(trainer.state.step, trainer.state.rows)
    if survival is not None:
        survival.protect(trainer)


def build_trainer(config: Config, task, mesh: Mesh, roles: Roles | None, device: torch.device = CPU) -> Trainer:
    """All that trains, found to be the same on all ranks. Collective, also with servers."""
    executor = build_executor(config, task, mesh, roles=roles, device=device)
    same_rows(executor.batches, mesh)
    note_mixing(executor, mesh)
    note_compression(config, executor, mesh)
    trainer = Trainer(config, executor, mesh, lambda line: None, build_evaluation(config, task, mesh))
    trainer.check()
    return trainer


def leave(code: int, roles: Roles | None) -> int:
    """The exit code, of which the servers hear too. Collective, also with them."""
    if roles is None:
        return code
    part(roles)
    return roles.everybody.broadcast_json(code)


def on_host(model: Stage, inputs: Any) -> Any:
    """Outputs of the whole model, wherever it is, for who knows of the host only."""
    return to_device(model.forward(to_device(inputs, model.device), 0, 0), CPU)


def launched(mesh: Mesh) -> bool:
    return mesh.world.comm is not None


def data_stamp(task):
    """What changes when somebody changes the data, None where the task does not tell."""
    return task.data_stamp() if hasattr(task, "data_stamp") else None


def same_data(task, mesh: Mesh) -> str | None:
    """The digest of the data that all ranks read; one rank of each node computes it.

    Raises AgreedError where some read other data. Collective.
    """
    lengths = [0 if data is None else len(data) for data in map(task.dataset, ("train", "eval"))]
    raise_where_different(
        mesh.world, [f"{lengths[0]} training and {lengths[1]} held-out rows"], "reads different data", "rank"
    )
    if not lengths[0]:
        raise AgreedError('--task: dataset("train") has no rows')
    if not hasattr(task, "data_sha256"):
        return None
    first = facts.first_of_node(mesh.world)
    digests = mesh.world.all_gather_json(task.data_sha256() if first == mesh.rank else None)
    raise_where_different(mesh.world, [f"sha256 {digests[first]}"], "reads different data", "rank")
    return digests[0]


def same_rows(batches: Batches, mesh: Mesh) -> None:
    """Raises AgreedError where ranks read other rows than rank 0, as a few of them tell. Collective."""
    last = batches.sampler.num_rows - 1
    lines = [f"row {row} has sha256 {batches.row_sha256(row)}" for row in sorted({0, last // 2, last})]
    raise_where_different(mesh.world, lines, "reads different data", "rank")


def leave_behind(summary: dict, model: Stage, task, folder: Path, launched: bool) -> None:
    """The file that says `done`, then what the user sees. Rank 0 only."""
    write_json(folder / "summary.json", summary)
    if hasattr(task, "sample"):
        with model.evaluating():
            text = or_note("sample", lambda: task.sample(lambda inputs: on_host(model, inputs)))
        if text is not None:
            print(f"\nA sample of the trained model:\n{text}\n")
    print_closing(summary, folder, launched=launched)
