"""Metrics over held-out rows: every row counts once, whatever the layout."""

from collections.abc import Callable

from hpctrain.comm.mesh import Mesh
from hpctrain.model.stage import Stage
from hpctrain.plan.grid import split_evenly
from hpctrain.train.checked import checked_metric
from hpctrain.train.loader import Reader, Request, read


class Evaluation:
    """`metric(outputs, targets)` gives {name: (sum, count)}; `num_rows` is the length of the reader's data set.

    With `num_batches` only so many times `global_batch_size` rows count, evenly spread and always the same.
    """

    def __init__(
        self,
        reader: Reader,
        num_rows: int,
        metric: Callable,
        mesh: Mesh,
        global_batch_size: int,
        num_batches: int | None = None,
        num_workers: int = 0,
    ):
        self._reader, self._metric, self._mesh, self._num_workers = reader, metric, mesh, num_workers
        self._batch_size = max(1, global_batch_size // mesh.data.size)
        self.num_rows = min(num_rows, num_batches * global_batch_size if num_batches else num_rows)
        mine = split_evenly(self.num_rows, mesh.data.size)[mesh.replica]
        self.rows = [place * num_rows // self.num_rows for place in mine]

    def run(self, stage: Stage) -> dict[str, float]:
        """Means by name, on every rank. Collective."""
        total = self._total(self._sums(stage, self.rows))
        return {name: value / count for name, (value, count) in total.items() if count}

    def names(self, stage: Stage) -> list[str]:
        """Names of the metrics, from one row of each replica. Collective."""
        return list(self._total(self._sums(stage, self.rows[:1])))

    def _sums(self, stage: Stage, rows: list[int]) -> dict[str, list[float]]:
        starts = range(0, len(rows), self._batch_size)
        requests = [Request(tuple(rows[start : start + self._batch_size])) for start in starts]
        sums: dict[str, list[float]] = {}
        with stage.evaluating():
            for inputs, targets in read(self._reader, requests, self._num_workers):
                add(sums, checked_metric(self._metric(stage.forward(inputs, 0, 0), targets)))
                self._mesh.progress.poll()
        return sums

    def _total(self, sums: dict[str, list[float]]) -> dict[str, list[float]]:
        total: dict[str, list[float]] = {}
        for part in self._mesh.data.all_gather_json(sums):
            add(total, part)
        return total


def add(sums: dict[str, list[float]], part) -> None:
    """Adds (sum, count) pairs by name."""
    for name, (value, count) in part.items():
        entry = sums.setdefault(name, [0.0, 0])
        entry[0] += value
        entry[1] += count
