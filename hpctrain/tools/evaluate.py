"""`hpctrain evaluate RUN`: the metrics of a finished run's weights, on its own held-out rows or on other data."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config, Parser, UsageError
from hpctrain.tasks.load import explained
from hpctrain.train.command import prepare_nodes, prepared_task
from hpctrain.train.errors import AgreedError
from hpctrain.train.saved import load_weights, read_config

SPLITS = {"eval": ("eval",), "train": ("train",), "all": ("train", "eval")}


def run(argv: list[str], world) -> int:
    """Prints a line a metric. Returns 0, or 2 with one line for what cannot be. Collective."""
    with Mesh(world) as mesh:
        asked = mesh.world.broadcast_json(_prepare(argv) if mesh.rank == 0 else None)
        fault = asked.get("usage") or prepare_nodes(asked["config"], mesh)
        if not fault:
            fault = _evaluate(Config(**asked["config"]), Path(asked["folder"]), asked["split"], mesh)
        if fault and mesh.rank == 0:
            print(f"hpctrain: {fault}", file=sys.stderr)
    return 2 if fault else 0


def parser() -> Parser:
    top = Parser("hpctrain evaluate", add_help=False)
    top.add_argument("run", metavar="RUN", help="the folder of a finished run")
    top.add_argument("--data", metavar="PATH", help="other data than the run's own")
    top.add_argument("--split", choices=SPLITS, default="eval", help="which rows (eval)")
    top.add_argument("--batches", metavar="N", help="so many global batches, evenly spread; default: every row")
    return top


def _prepare(argv: list[str]) -> dict:
    name = ""
    try:
        asked = parser().parse(argv)
        config = read_config(Path(asked["run"]))
        data = config.data if asked["data"] is None else str(Path(asked["data"]).absolute())
        batches = asked["batches"]
        if batches is not None and not (batches.isdecimal() and int(batches) > 0):
            raise UsageError(f"--batches: expected a whole number >= 1, got {batches!r}")
        config = replace(config, data=data, eval_batches=batches and int(batches))
        name = config.task
        prepared_task(config)
    except ValueError as error:
        return {"usage": explained(name, error) if name else str(error)}
    return {"config": asdict(config), "folder": str(Path(asked["run"]).absolute()), "split": asked["split"]}


def _evaluate(config: Config, folder: Path, split: str, mesh: Mesh) -> str | None:
    """Prints the metrics; what is wrong with the weights that some rank reads, if anything. Collective."""
    import torch
    from torch.utils.data import ConcatDataset

    from hpctrain.tasks.load import build_task
    from hpctrain.train.build import build_evaluation, build_model

    torch.set_num_threads(config.threads)
    task = build_task(config.task, config.task_option, config.data)
    fault = None
    try:
        stage = build_model(config, task)
        load_weights(stage.state(), folder)
    except (UsageError, AgreedError) as error:
        fault = str(error)
    if told := next(filter(None, mesh.world.all_gather_json(fault)), None):
        return told
    parts = [part for part in map(task.dataset, SPLITS[split]) if part is not None and len(part)]
    if not parts:
        return f"--split {split}: the task has no such rows"
    rows = ConcatDataset(parts)
    evaluation = build_evaluation(config, task, mesh, rows, rows.cumulative_sizes[:-1])
    metrics = evaluation.run(stage)
    if mesh.rank == 0:
        data = config.data or "the task's own data"
        counted = f"{len(rows)}" if evaluation.num_rows == len(rows) else f"{evaluation.num_rows} of {len(rows)}"
        print(f"{counted} rows ({split}) of {data}, weights of {folder}")
        for name, value in metrics.items():
            print(f"{name} {value:.6g}", flush=True)
    return None
