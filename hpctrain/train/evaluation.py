"""Metrics over held-out rows: every row counts once, whatever the layout."""

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.model.stage import Stage
from hpctrain.plan.grid import split_evenly
from hpctrain.train.batches import read_rows


def evaluate(stage: Stage, metric, dataset, batch_size: int, dtype: torch.dtype, mesh: Mesh) -> dict[str, float]:
    """Means by name over all rows of `dataset`, on every rank. `metric` gives {name: (sum, count)}. Collective."""
    rows = split_evenly(len(dataset), mesh.data.size)[mesh.replica]
    sums: dict[str, list[float]] = {}
    stage.train(False)
    with torch.no_grad():
        for start in range(rows.start, rows.stop, batch_size):
            inputs, targets = read_rows(dataset, range(start, min(start + batch_size, rows.stop)), dtype)
            add(sums, metric(stage.forward(inputs, 0, 0), targets))
            mesh.progress.poll()
    stage.train(True)
    total: dict[str, list[float]] = {}
    for part in mesh.data.all_gather_json(sums):
        add(total, part)
    return {name: value / count for name, (value, count) in total.items() if count}


def add(sums: dict[str, list[float]], part) -> None:
    """Adds (sum, count) pairs by name."""
    for name, (value, count) in part.items():
        entry = sums.setdefault(name, [0.0, 0])
        entry[0] += float(value)
        entry[1] += int(count)
