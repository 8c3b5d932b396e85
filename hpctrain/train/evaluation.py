"""Metrics over held-out rows: every row counts once, whatever the layout."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from hpctrain.comm.mesh import Mesh
from hpctrain.model.boundary import pack, unpack
from hpctrain.model.stage import Stage
from hpctrain.model.structure import to_device
from hpctrain.plan.grid import split_evenly
from hpctrain.plan.program import forwards
from hpctrain.plan.schedule import Action, Op, Place
from hpctrain.train.checked import checked_figures, checked_metric
from hpctrain.train.links import Links
from hpctrain.train.loader import Reader, Request, read
from hpctrain.train.passes import copied_if_lent


class Evaluation:
    """`metric(outputs, targets)` gives {name: (sum, count)}; `num_rows` is the length of the reader's data set.

    With `num_batches` only so many times `global_batch_size` rows count, evenly spread and always the same. Rows on two
    sides of one of `borders` are in different batches, since they may have different shapes. `figures` makes of the
    means by name what is shown.
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
        figures: Callable[[dict], dict] = dict,
        borders: Sequence[int] = (),
    ):
        self._reader, self._metric, self._mesh, self._num_workers = reader, metric, mesh, num_workers
        self._figures, self._borders = figures, borders
        self._batch_size = max(1, global_batch_size // mesh.data.size)
        self.num_rows = min(num_rows, num_batches * global_batch_size if num_batches else num_rows)
        mine = split_evenly(self.num_rows, mesh.data.size)[mesh.replica]
        self.rows = [place * num_rows // self.num_rows for place in mine]

    def run(self, stage: Stage, links: Links | None = None) -> dict[str, float]:
        """Means by name, on every rank; `links` lead to the other stages, where there are any. Collective."""
        total = self._total(self._sums(stage, links, self.rows))
        return checked_figures(self._figures({name: value / count for name, (value, count) in total.items() if count}))

    def names(self, stage: Stage, links: Links | None = None) -> list[str]:
        """Names of the metrics, from one row of each replica. Collective."""
        return list(self._figures(dict.fromkeys(self._total(self._sums(stage, links, self.rows[:1])), 1.0)))

    def _sums(self, stage: Stage, links: Links | None, rows: list[int]) -> dict[str, list[float]]:
        requests = [Request(tuple(piece)) for piece in self._cut(rows)]
        sums: dict[str, list[float]] = {}
        with stage.evaluating():
            for outputs, targets in outputs_of(stage, links, self._mesh, self._batches(requests), len(requests)):
                add(sums, checked_metric(self._metric(outputs, targets)))
        return sums

    def _cut(self, rows: list[int]) -> Iterator[list[int]]:
        for _, group in groupby(rows, key=lambda row: bisect_right(self._borders, row)):
            group = list(group)
            yield from (group[start : start + self._batch_size] for start in range(0, len(group), self._batch_size))

    def _batches(self, requests: list[Request]) -> Iterator[tuple[Any, Any]]:
        """Read only when somebody asks: the first stage and the last one."""
        yield from read(self._reader, requests, self._num_workers)

    def _total(self, sums: dict[str, list[float]]) -> dict[str, list[float]]:
        total: dict[str, list[float]] = {}
        for part in self._mesh.everybody.all_gather_json(sums):
            add(total, part)
        return total


def outputs_of(
    stage: Stage, links: Links | None, mesh: Mesh, batches: Iterator[tuple[Any, Any]], num_batches: int
) -> Iterator[tuple[Any, Any]]:
    """Outputs of the model and targets of each batch, where this rank has the last layer; nothing elsewhere.

    Collective over the stages of a replica, which all take equally many batches.
    """
    place = Place(mesh.stage, mesh.grid.num_stages, num_chunks=len(stage.parts))
    waiting: dict[Action, Any] = {}
    for action in forwards(place, num_batches):
        mesh.progress.begin(f"{action} of an evaluation")
        first, last = stage.is_first(action.chunk), stage.is_last(action.chunk)
        if action.op is Op.RECV_F:
            waiting[action] = links.take(Op.RECV_F, action.chunk)
        elif action.op is Op.F:
            inputs, targets = to_device(next(batches), stage.device) if first or last else (None, None)
            received = waiting.pop(action._replace(op=Op.RECV_F), None)
            inputs = inputs if received is None else unpack(*received)
            outputs = stage.forward(inputs, 0, 0, action.chunk)
            if last:
                yield outputs, targets
            else:
                waiting[action] = _packed(outputs, received)
            if received is not None:
                links.release(Op.RECV_F, action.chunk, received[0])
        else:
            links.put(Op.SEND_F, action.chunk, *waiting.pop(action._replace(op=Op.F)))
            links.wait_for_room(Op.SEND_F, action.chunk, place.num_stages)  # or the first stage runs ahead
        mesh.progress.poll()


def _packed(outputs: Any, received: tuple | None) -> tuple[list, Any]:
    tensors, note = pack(outputs, lambda tensor: False)
    return copied_if_lent(tensors, [] if received is None else [(Op.RECV_F, received[0])]), note


def add(sums: dict[str, list[float]], part) -> None:
    """Adds (sum, count) pairs by name."""
    for name, (value, count) in part.items():
        entry = sums.setdefault(name, [0.0, 0])
        entry[0] += value
        entry[1] += count
