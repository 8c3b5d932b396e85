"""One server's share of the parameters and its clock: what a push changes and when a pull may be answered.

No messages here. A worker's iteration is staged until its last part has come, so what is refused changes nothing. With
staleness 0 the iterations of all workers are gathered and applied once, in worker order: bulk synchronous. Otherwise
each is applied as it is finished.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf

import torch

from hpctrain.comm.abort import RankFailed
from hpctrain.model.dense_table import DenseTable
from hpctrain.model.row_values import TableError
from hpctrain.model.tables import EmbeddingTable
from hpctrain.plan.staleness import StalenessClock
from hpctrain.train.iteration import Gradient, Iteration, Refused
from hpctrain.train.round import Round
from hpctrain.train.service import ServiceSettings


class Shard:
    """`dense` and `tables` of one server, for `num_workers`. `told(clock, loss, items)` hears of each finished round.

    `log`, where wanted, is told of all that is served and applied, in order, as a dict.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        dense: DenseTable | None,
        tables: list[EmbeddingTable],
        num_workers: int,
        told: Callable[[int, float, float], None] = lambda clock, loss, items: None,
        log: Callable[[dict], None] | None = None,
    ):
        self.settings, self.dense, self.tables = settings, dense, tables
        self.version = 0  # updates applied
        self.last: Gradient = Gradient()
        self.gaps: Counter[int] = Counter()
        self.lags: Counter[int] = Counter()
        self._round = Round(settings)
        self._told, self._log = told, log
        self._meet(num_workers)

    def _meet(self, num_workers: int) -> None:
        self.clock = StalenessClock(num_workers, self.settings.staleness)
        self._staged: dict[int, Iteration] = {}
        self._rounds: dict[int, dict[int, Iteration]] = {}  # by clock and worker: finished and not applied
        self._totals: dict[int, dict[int, tuple[float, float]]] = {}  # loss and items by clock and worker, till told
        self._read = [self.version] * num_workers  # version that each worker has read last
        self._own: list[deque[int]] = [deque() for _ in range(num_workers)]  # versions that a worker's updates made
        self._applied = self.num_complete = 0  # rounds; the latter have been told of

    @property
    def num_segments(self) -> int:
        """Of the dense part."""
        return 0 if self.dense is None else len(self.dense.parameters)

    def begin_at(self, clock: int) -> None:
        """All workers have finished so many iterations, before this shard came to be."""
        self.clock.begin_at(clock)
        self._applied = self.num_complete = clock
        self._write({"do": "load", "clock": clock})

    def keep_workers(self, workers: Sequence[int]) -> None:
        """The others are lost, these are 0, 1, ... from now on. Forgets what is not applied."""
        step = self._applied if self.settings.gathers else min(self.clock.clocks[worker] for worker in workers)
        self._meet(len(workers))
        self._log = None
        self.begin_at(step)

    def speak_through(self, told: Callable[[int, float, float], None], log: Callable[[dict], None] | None) -> None:
        """From now on."""
        self._told, self._log = told, log

    # ---- what workers push

    def stage(self, worker: int, clock: int, table: int, touched, ids, values: torch.Tensor | None) -> None:
        """A part of the iteration `clock` of a worker; `table` -1 is the dense part. Raises Refused.

        Keeps `values`, and changes them when they are applied.
        """
        self._check_clock(worker, clock)
        iteration = self._staged.setdefault(worker, Iteration(clock))
        if table < 0:
            self._check_dense(worker, clock, values)
            iteration.dense, iteration.touched = values, touched
        else:
            self._attempt(worker, clock, lambda: self._table(table).check(ids, values))
            iteration.rows[table] = ids, values

    def finish(
        self,
        worker: int,
        clock: int,
        items: float,
        loss: float,
        lr: float,
        read: int = -1,
        suspect: bool = False,
    ) -> None:
        """The iteration is whole: it counts, and is applied as soon as it may be. Raises Refused.

        `read`: the version that it was computed with, -1 for the last that the worker pulled. `suspect`: not all of it
        may be finite.
        """
        self._check_clock(worker, clock)
        iteration = self._staged.pop(worker, None) or Iteration(clock)
        for what, number in (("items", items), ("lr", lr)):
            if not 0 <= number < inf:
                raise Refused(f"worker {worker} clock {clock}: {what} {number:g}; a finite number from 0 on would do")
        if suspect:
            self._check_finite(worker, iteration)
        iteration.items, iteration.loss, iteration.lr = items, loss, lr
        iteration.lag = self._lag(worker, self._read[worker] if read < 0 else read)
        if self.settings.gathers:
            self._attempt(worker, clock, lambda: self._touch(iteration.rows))
            self._rounds.setdefault(clock, {})[worker] = iteration
        else:
            self._attempt(worker, clock, lambda: self._apply_one(worker, iteration))
        self._totals.setdefault(clock, {})[worker] = loss, items
        self.clock.tick(worker)
        self._advance()

    def retire(self, worker: int) -> None:
        """Nobody waits for this worker any more; what it staged without finishing is dropped."""
        self._staged.pop(worker, None)
        self.clock.retire(worker)
        self._write({"do": "retire", "worker": worker, "clock": self.clock.clocks[worker]})
        self._advance()

    def drop(self, worker: int) -> None:
        """Forgets what a worker has staged."""
        self._staged.pop(worker, None)

    # ---- what workers pull

    def served(self, worker: int, clock: int, table: int, counts: bool = True) -> None:
        """Notes that a read at `clock` is answered with the values of now; one that only looks does not count."""
        gap = self.clock.gap(clock)
        if counts:
            self.gaps[gap] += 1
        self._read[worker] = self.version
        event = {"do": "pull", "worker": worker, "clock": clock, "table": table, "gap": gap, "version": self.version}
        self._write(event)

    def rows(self, worker: int, clock: int, table: int, ids: torch.Tensor, create: bool, empty=torch.empty):
        """As EmbeddingTable.rows. Raises Refused."""
        return self._attempt(worker, clock, lambda: self._table(table).rows(ids, create, empty))

    # ---- inside

    def _lag(self, worker: int, read: int) -> int:
        """Updates since version `read`, its own not counted; of gathered rounds all."""
        own = self._own[worker]
        while own and own[0] <= read:
            own.popleft()
        return self.version - read - len(own)

    def _check_clock(self, worker: int, clock: int) -> None:
        own = self.clock.clocks[worker]
        if clock != own or not self.clock.running[worker]:
            gone = "" if self.clock.running[worker] else ", and it has retired"
            raise Refused(f"worker {worker} pushes at clock {clock}, its clock is {own}{gone}")

    def _check_dense(self, worker: int, clock: int, values: torch.Tensor | None) -> None:
        if values is None:
            return
        length = 0 if self.dense is None else len(self.dense.values)
        if len(values) != length:
            raise Refused(f"worker {worker} clock {clock}: dense gradients of {len(values)} elements, not {length}")

    def _check_finite(self, worker: int, iteration: Iteration) -> None:
        for table, (ids, sums) in iteration.rows.items():
            self._attempt(worker, iteration.clock, partial(self.tables[table].refuse_infinite, ids, sums))
        if iteration.dense is not None and not torch.isfinite(iteration.dense).all():
            raise Refused(f"worker {worker} clock {iteration.clock}: NaN or infinity in the dense gradients")

    def _table(self, number: int) -> EmbeddingTable:
        if number >= len(self.tables):
            raise TableError(f"there is no table number {number}")
        return self.tables[number]

    def _attempt(self, worker: int, clock: int, call: Callable):
        try:
            return call()
        except (TableError, ValueError) as error:
            raise Refused(f"worker {worker} clock {clock}: {error}") from None

    def _advance(self) -> None:
        """Applies the rounds that are whole now, and tells of those that all have finished.

        RankFailed where a round cannot be applied: all its workers have been told to go on.
        """
        while self.settings.gathers and self._applied < self.clock.min_clock:
            try:
                self._apply_round(self._rounds.pop(self._applied, {}))
            except (TableError, ValueError) as error:
                raise RankFailed(f"round {self._applied}: {error}") from None
            self._applied += 1
        while self.num_complete < self.clock.min_clock:
            totals = self._totals.pop(self.num_complete, {})
            loss, items = (sum(totals[worker][which] for worker in sorted(totals)) for which in (0, 1))
            self._told(self.num_complete, loss, items)
            self.num_complete += 1

    def _apply_round(self, pushed: dict[int, Iteration]) -> None:
        """All iterations of one clock as one update."""
        each = [pushed[worker] for worker in sorted(pushed)]
        update = self._round.combine(each)
        self.last = update
        lr = next((iteration.lr for iteration in each), 0.0)
        lag = max((iteration.lag for iteration in each if iteration.rows or iteration.dense is not None), default=0)
        if self.settings.update == "server" and update.items:
            self._step(update, lr)
        self.version += 1
        self.lags[lag] += 1
        clock = each[0].clock if each else self._applied
        event = {"do": "apply", "workers": sorted(pushed), "clock": clock, "version": self.version, "lr": lr}
        self._write({**event, "lag": lag})

    def _apply_one(self, worker: int, iteration: Iteration) -> None:
        """One worker's iteration as an update of its own."""
        lr = iteration.lr / max(1, iteration.lag) if self.settings.adapt_lr else iteration.lr
        if iteration.items:
            scale = 1.0 / iteration.items if self.settings.aggregate == "mean" else 1.0
            rows = {table: (ids, sums.mul_(scale)) for table, (ids, sums) in iteration.rows.items()}
            dense = None if iteration.dense is None else iteration.dense.mul_(scale)
            self._step(Gradient(iteration.items, iteration.loss, dense, iteration.touched, rows), lr)
        self.version += 1
        self._own[worker].append(self.version)
        self.lags[iteration.lag] += 1
        event = {"do": "apply", "workers": [worker], "clock": iteration.clock, "version": self.version, "lr": lr}
        self._write({**event, "lag": iteration.lag})

    def _step(self, update: Gradient, lr: float) -> None:
        self._touch(update.rows)
        for table, (ids, gradients) in update.rows.items():
            self.tables[table].push(ids, gradients, lr=lr, distinct=self.settings.gathers)
        if update.dense is not None:
            self.dense.step(update.dense, touched=self._named(update.touched), lr=lr)

    def _touch(self, rows: Mapping) -> None:
        """Whatever is full says so, before anything changes."""
        for table, (ids, _) in rows.items():
            self.tables[table].touch(ids)

    def _named(self, touched: list[bool] | None) -> Iterable[str] | None:
        return None if touched is None else [name for name, used in zip(self.dense.parameters, touched) if used]

    def _write(self, event: dict) -> None:
        if self._log is not None:
            self._log(event)
