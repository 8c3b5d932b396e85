"""One run from its configuration to its summary: builds the parts, lets the Trainer train, leaves the folder behind."""

import sys
from pathlib import Path

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.weights import combined, fingerprints, save_weights
from hpctrain.report.console import ProgressLine, print_closing
from hpctrain.report.metrics import MetricsFile
from hpctrain.report.summary import write_json
from hpctrain.tasks.protocol import build_task
from hpctrain.train import facts
from hpctrain.train.build import DTYPES, build_executor
from hpctrain.train.errors import AgreedError
from hpctrain.train.evaluation import evaluate
from hpctrain.train.executor import Executor
from hpctrain.train.start import raise_where_different
from hpctrain.train.trainer import Trainer


def run_training(config: Config, folder: Path, mesh: Mesh) -> int:
    """Trains on all ranks; returns the exit code. Collective."""
    torch.set_num_threads(config.threads)
    task = build_task(config.task, config.task_option, config.data)
    recorder = Recorder(folder, config.steps, launched(mesh)) if mesh.rank == 0 else None
    try:
        data_sha256 = same_data(task, mesh)
        executor = build_executor(config, task, mesh)
        trainer = Trainer(config, executor, mesh, recorder.note if recorder else lambda line: None)
        trainer.train()
        weights_sha256 = save_final_weights(executor, folder, mesh)
    except AgreedError as error:
        if recorder:
            recorder.close()
            print(f"hpctrain: {error}", file=sys.stderr)
        return 1
    if recorder:
        recorder.close()
        print("evaluating on the held-out rows", flush=True)
    hashes = {"weights_sha256": weights_sha256, "data_sha256": data_sha256}
    summary = summarise(config, task, trainer, mesh, hashes)
    if recorder:
        leave_behind(summary, executor, task, folder, launched(mesh))
    return 0


def launched(mesh: Mesh) -> bool:
    return mesh.world.comm is not None


def same_data(task, mesh: Mesh) -> str | None:
    """The digest of the data that all ranks read. Raises AgreedError where some read other data. Collective."""
    digest = task.data_sha256() if hasattr(task, "data_sha256") else None
    raise_where_different(mesh.world, [f"sha256 {digest}"], "reads other data")
    return digest


def save_final_weights(executor: Executor, folder: Path, mesh: Mesh) -> str:
    """Writes model.safetensors, first thing after the last step; returns the fingerprint of the weights.

    Raises AgreedError where replicas drifted apart. Collective.
    """
    lines = fingerprints(executor.stage.named_parameters())
    raise_where_different(mesh.data, lines, "holds other weights at the end")
    if mesh.rank == 0:
        save_weights(executor.stage.state(), folder / "model.safetensors")
    return combined(lines)


def summarise(config: Config, task, trainer: Trainer, mesh: Mesh, hashes: dict) -> dict:
    """The summary of a finished run, on every rank. Collective."""
    executor, grid, counters = trainer.executor, mesh.grid, mesh.data.ring.counters
    rows = max(1, config.global_batch_size // mesh.data.size)
    metrics = evaluate(executor.stage, task.metric, task.dataset("eval"), rows, DTYPES[config.precision], mesh)
    by_rank = mesh.world.all_gather_json(
        [counters.bytes_sent, counters.messages_sent, counters.control_messages, facts.peak_memory_bytes()]
    )
    sent, messages, control, memory = map(list, zip(*by_rank))
    layout = {"stages": grid.num_stages, "replicas": grid.num_replicas, "servers": 0, "ranks": grid.num_ranks}
    return {
        "done": True,
        "task": config.task,
        "layout": layout,
        **trainer.figures(),
        "baseline": task.baseline() if mesh.rank == 0 and hasattr(task, "baseline") else None,
        "eval": metrics,
        "bytes_sent_per_rank": sent,
        "messages_sent_per_rank": messages,
        "control_messages_per_rank": control,
        "allreduce": executor.reduction.figures(),
        "bubble_rate": None,
        "peak_in_flight": [executor.peak_in_flight],
        "weight_versions": [1],
        "staleness": None,
        "peak_activation_bytes": None,
        "peak_memory_bytes": memory,
        "weights_sha256": hashes["weights_sha256"],
        "environment": facts.environment(mesh, config.threads, hashes["data_sha256"]),
    }


def leave_behind(summary: dict, executor: Executor, task, folder: Path, launched: bool) -> None:
    """What the user sees, then the file that says `done`. Rank 0 only."""
    if hasattr(task, "sample"):
        executor.stage.train(False)
        with torch.no_grad():
            text = task.sample(lambda inputs: executor.stage.forward(inputs, 0, 0))
        print(f"\nA sample of the trained model:\n{text}\n")
    print_closing(summary, folder, launched=launched)
    write_json(folder / "summary.json", summary)


class Recorder:
    """What rank 0 notes of each step: a line in metrics.jsonl, and the progress on the console."""

    def __init__(self, folder: Path, num_steps: int, launched: bool):
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._progress = ProgressLine(num_steps, launched=launched)

    def note(self, line: dict) -> None:
        self._metrics.write(line)
        self._progress.update(line)

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
