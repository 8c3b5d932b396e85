"""A worker's update through servers: it pulls weights, pushes gradients, and nobody waits for all.

PULL brings what the step is computed with: weights that the servers stepped, or the gradient that they added up, with
which this worker steps its own copy. PUSH sends sums and the number of items behind them.
"""

import math
from collections import deque

import torch

from hpctrain.comm.abort import RankFailed
from hpctrain.plan.program import ALL
from hpctrain.plan.schedule import Action, Op
from hpctrain.plan.sharding import Segment
from hpctrain.train.agreement import whole
from hpctrain.train.client import ServiceClient
from hpctrain.train.host_copy import HostCopy, empty_like
from hpctrain.train.lookups import LocalRows, Rows, ServedRows, check_rows, oldest
from hpctrain.train.pull import Pull
from hpctrain.train.update import StepResult, Update


class ServedUpdate(Update):
    """As Update. `flat` is the memory that all parameters lie in, laid out as the gradients.

    `delay`: rounds that are computed with the weights of one pull, beside the first. `window`: a pull is asked for so
    many rounds before it is used. What is not finite ends the job at once, by one line of the worker that sees it.
    """

    served = ALL

    def __init__(self, *args, client: ServiceClient, flat: torch.Tensor, delay: int = 0, window: int = 0, **settings):
        super().__init__(*args, **settings)
        self.client, self.flat = client, flat
        self._on_host = flat.device.type == "cpu"
        self._gradients = HostCopy(self.gradients.flat) if len(flat) else None
        self._every, self._window = delay + 1, window
        self.steps = client.description.settings.update == "worker"
        self._numbers = {table.name: number for number, table in enumerate(client.description.tables)}
        self._segments: list[Segment] = [each for part in client.description.parts for each in part.segments]
        self._pulls: dict[int, list[Pull]] = {}  # by step: of the dense part, and of gradients of tables
        self._unused: deque[torch.Tensor] = deque()
        self._first = 0  # the step at which all had pushed everything
        self._until = 0  # and the next one
        self._read: dict[int, int] = dict.fromkeys(range(len(client.description.parts)), 0)  # versions, by server
        self._num_told = 0  # rounds that rank 0 has heard of
        self._num_made = 0  # steps of this worker's own copy
        self.methods |= {Op.PULL: self._pull, Op.PUSH: self._push}

    def begin(self, step: int) -> None:
        self.step_number = step
        self._loss = self._items = 0.0
        self.client.wait_sent()
        self.gradients.zero()

    def begin_at(self, step: int) -> None:
        """All workers and servers have done so many."""
        self._num_told = self._num_made = step

    def read_again(self, step: int) -> None:
        if not self.steps:
            self._read_all(step)

    def num_made(self, num_told: int) -> int:
        return self._num_made

    def run(self, first: int, stop: int) -> None:
        self._first, self._until = first, stop

    def stop_after(self, step: int) -> None:
        self._until = step + 1

    def add_loss(self, microbatch: int, loss: torch.Tensor, items: float) -> None:
        if not torch.isfinite(loss):
            raise RankFailed(f"step {self.step_number + 1}: not finite: the loss on rank {self.mesh.rank}")
        self._loss += float(loss)
        self._items += items

    def note_detached(self, microbatch: int) -> None:
        if self._items:
            raise RankFailed(f"step {self.step_number + 1}: the loss depends on no parameter; is it detached?")

    def _start_reduction(self, number: int) -> None:
        name = self.gradients.not_finite(self.gradients.buckets[number])
        if name is not None:
            where = f"the gradient of {name} on rank {self.mesh.rank}"
            raise RankFailed(f"step {self.step_number + 1}: not finite: {where}")

    # ---- pulls

    def _clock_of(self, step: int) -> int:
        """When the weights of a step are read."""
        return max(self._first, step - step % self._every - self._window)

    def _ask(self, step: int) -> None:
        """Asks for what `step` is computed with, where that is not what it has already."""
        if step in self._pulls or step == self._first or step % self._every:
            return
        clock = self._clock_of(step)
        if self.steps:
            self._pulls[step] = [self.client.pull(clock, self._memory())]
            self._pulls[step] += [self.client.pull_gradient(table, clock) for table in self._numbers.values()]
        else:
            into = self._memory() if self._window else self._weights_memory()
            self._pulls[step] = [self.client.pull(clock, into, ahead=self._window > 0)]

    def _pull(self, action: Action) -> None:
        step = self.step_number
        for each in range(step, min(step + self._window + 1, self._until) if step == self._first else step + 1):
            self._ask(each)
        self._take(step)
        if self.lookups is not None:
            self._look_up(step)

    def _look_up(self, step: int) -> None:
        """Rows of this step, which are waited for, and of later ones, which come as soon as they may be read.

        What is read at one clock is asked for together, before the push of that clock: so with staleness 0 it is what
        all had pushed until then, and nothing more.
        """
        last = step + max(1, self._window)
        for each in range(step, min(last - last % self._every + self._every, self._until)):
            self.lookups.ask(each, self._clock_of(each))
        self.lookups.load(step)

    def _take(self, step: int) -> None:
        pulls = [pull.wait() for pull in self._pulls.pop(step, [])]
        self._read = pulls[0].versions if pulls else self._read
        if pulls and self.steps:
            self._apply(*pulls, step=step - 1)
        for pull in pulls:
            if pull.table < 0:
                self._take_over(pull.values)

    def _memory(self) -> torch.Tensor:
        return self._unused.pop() if self._unused else empty_like(self.flat)

    def _weights_memory(self) -> torch.Tensor:
        """Where weights come to that nobody computes with meanwhile: the parameters themselves, if they are here."""
        return self.flat if self._on_host else self._memory()

    def _take_over(self, values: torch.Tensor) -> None:
        """What came for the dense part: the weights, where this worker does not step itself."""
        if values is not self.flat:
            if not self.steps:
                self.flat.copy_(values)
            self._unused.append(values)

    def _apply(self, dense: Pull, *tables: Pull, step: int) -> None:
        """One step of this worker's copy, with the gradient of all."""
        self._num_made = step + 1
        rows = {self.client.description.tables[pull.table].name: (pull.ids, pull.values) for pull in tables}
        rows = {name: each for name, each in rows.items() if len(each[0])}
        if not dense.items:
            return
        if len(self.flat):
            touched = {segment.name for segment, used in zip(self._segments, dense.touched) if used}
            self.gradients.flat.copy_(dense.values)
            self.gradients.attach(touched)
        scale = 1.0 if self.clip_norm is None else self._clip(rows)
        self.change(step)
        self.gradients.zero()
        if rows:
            assert isinstance(self.lookups.source, LocalRows)
            self.lookups.source.change(rows, self.rate(step), scale)

    def _clip(self, rows: Rows) -> float:
        """Shortens the gradient of dense part and rows together; returns what the rows have yet to be multiplied by."""
        if self.lookups is None:
            self.gradients.clip(self.clip_norm)
            return 1.0
        squares = [float(torch.linalg.vector_norm(sums, dtype=torch.float64)) ** 2 for _, sums in rows.values()]
        norm = math.sqrt(self.gradients.squared_norm(self.gradients.parameters) + sum(squares))
        return self.gradients.shorten(self.clip_norm, norm)

    # ---- pushes

    def _push(self, action: Action) -> None:
        step = self.step_number
        self.gradients.flush()
        rows = {} if self.lookups is None else self.lookups.gradients()
        check_rows(rows, step, self.mesh.rank)
        self.client.push(
            step,
            self._items,
            self._loss,
            self.rate(step),
            self._gradients.fetch() if self._gradients else None,
            [self.gradients.touched[segment.name] for segment in self._segments],
            {self._numbers[name]: each for name, each in rows.items()},
            self._version(),
        )
        self.items_seen += self._items
        self.result = StepResult(self._loss / self._items if self._items else None, whole(self._items))
        if step + 1 + self._window < self._until:
            self._ask(step + 1 + self._window)
        if self.mesh.rank:
            self.on_result(self.result)
        self._tell()

    def _version(self) -> dict[int, int]:
        """By server, the oldest that this step was computed with."""
        source = None if self.lookups is None else self.lookups.source
        return oldest(self._read, source.versions) if isinstance(source, ServedRows) else self._read

    def _tell(self) -> None:
        """On rank 0 a step's result is that of all workers, once all have finished it."""
        while self.mesh.rank == 0 and self.client.notes:
            _, loss, items = self.client.notes.popleft()
            self._num_told += 1
            self.result = StepResult(loss / items if items else None, whole(items))
            self.on_result(self.result)

    def end(self) -> None:
        """Waits for all workers: what follows sees all that was pushed, and nothing else."""
        stop = self._until
        if self.steps:
            self._ask(stop)
            self._take(stop)
        else:
            self._read_all(stop)
        self.mesh.barrier()  # nobody goes on before all have read
        if self.mesh.rank == 0:
            self.client.progress.wait(lambda: self.client.poll() or self._num_told + len(self.client.notes) >= stop)
            self._tell()

    def _read_all(self, step: int) -> None:
        """As all workers have left it after so many steps."""
        pull = self.client.pull(step, self._weights_memory(), bound=0).wait()
        self._read = pull.versions
        self._take_over(pull.values)
        if self.lookups is not None and isinstance(self.lookups.source, ServedRows):
            self.lookups.source.clock = step
