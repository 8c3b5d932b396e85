"""One run from its configuration to its summary: builds the parts, lets the Trainer train, leaves the folder behind."""

import sys
from pathlib import Path

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.weights import combined, fingerprints, save_weights
from hpctrain.report.console import Progress, print_closing
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


def train(config: Config, folder: Path, mesh: Mesh) -> int:
    """Trains on all ranks; returns the exit code. Collective."""
    torch.set_num_threads(config.threads)
    task = build_task(config.task, config.task_option, config.data)
    recorder = Recorder(folder, config.steps) if mesh.rank == 0 else None
    try:
        executor = build_executor(config, task, mesh)
        trainer = Trainer(config, executor, mesh, recorder.note if recorder else lambda line: None)
        trainer.train()
        summary = summarise(config, task, trainer, mesh)
    except AgreedError as error:
        if recorder:
            recorder.close()
            print(f"hpctrain: {error}", file=sys.stderr)
        return 1
    if recorder:
        recorder.close()
        leave_behind(summary, executor, task, folder)
    return 0


def summarise(config: Config, task, trainer: Trainer, mesh: Mesh) -> dict:
    """The summary of a finished run, on every rank. Raises AgreedError where replicas drifted apart. Collective."""
    executor = trainer.executor
    rows = max(1, config.global_batch_size // mesh.data.size)
    metrics = evaluate(executor.stage, task.metric, task.dataset("eval"), rows, DTYPES[config.precision], mesh)
    lines = fingerprints(executor.stage.named_parameters())
    raise_where_different(mesh.data, lines, "holds other weights at the end")
    counters = mesh.data.ring.counters
    by_rank = mesh.world.all_gather_json(
        [counters.bytes_sent, counters.messages_sent, counters.control_messages, facts.peak_memory_bytes()]
    )
    sent, messages, control, memory = map(list, zip(*by_rank))
    return {
        "done": True,
        "task": config.task,
        "layout": {
            "stages": mesh.grid.num_stages,
            "replicas": mesh.grid.num_replicas,
            "servers": 0,
            "ranks": mesh.world.size,
        },
        **trainer.figures(),
        "baseline": task.baseline() if mesh.rank == 0 and hasattr(task, "baseline") else None,
        "eval": metrics,
        "bytes_sent_per_rank": sent,
        "messages_sent_per_rank": messages,
        "control_messages_per_rank": control,
        "allreduce": executor.reduction_figures(),
        "bubble_rate": None,
        "peak_in_flight": [executor.peak_in_flight],
        "weight_versions": [1],
        "staleness": None,
        "peak_activation_bytes": None,
        "peak_memory_bytes": memory,
        "weights_sha256": combined(lines),
        "environment": facts.environment(mesh, config.threads, task.data_sha256()),
    }


def leave_behind(summary: dict, executor: Executor, task, folder: Path) -> None:
    """Weights, then the summary (which says `done`), then what the user sees. Rank 0 only."""
    save_weights(executor.stage.state(), folder / "model.safetensors")
    write_json(folder / "summary.json", summary)
    if hasattr(task, "sample"):
        executor.stage.train(False)
        with torch.no_grad():
            print(
                f"\nThe model continues a text:\n{task.sample(lambda tokens: executor.stage.forward(tokens, 0, 0))}\n"
            )
    print_closing(summary, folder)


class Recorder:
    """What rank 0 notes of each step: a line in metrics.jsonl, and the progress on the console."""

    def __init__(self, folder: Path, num_steps: int):
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._progress = Progress(num_steps)

    def note(self, line: dict) -> None:
        self._metrics.write(line)
        self._progress.update(line)

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
