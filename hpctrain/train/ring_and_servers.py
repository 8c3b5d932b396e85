"""The dense part of a model along the ring of the workers, its tables on servers, in one step."""

import torch

from hpctrain.plan.program import TABLES
from hpctrain.plan.schedule import Action, Op
from hpctrain.train.client import ServiceClient
from hpctrain.train.lookups import ServedRows, check_rows
from hpctrain.train.update import Update


class RingAndServers(Update):
    """As Update; PULL brings the rows of a step, PUSH sends their gradients."""

    served = TABLES

    def __init__(self, *args, client: ServiceClient, **settings):
        super().__init__(*args, **settings)
        self.client, self._until = client, 0
        self._numbers = {table.name: number for number, table in enumerate(client.description.tables)}
        self.methods |= {Op.PULL: self._pull, Op.PUSH: self._push}

    def run(self, first: int, stop: int) -> None:
        self._until = stop

    def stop_after(self, step: int) -> None:
        self._until = step + 1

    def end(self) -> None:
        """Reads that follow see all that was pushed."""
        assert isinstance(self.lookups.source, ServedRows)
        self.lookups.source.clock = self._until
        if self.mesh.rank == 0:
            self.client.notes.clear()

    def add_loss(self, microbatch: int, loss: torch.Tensor, items: float) -> None:
        super().add_loss(microbatch, loss, items)
        self._loss += float(loss)
        self._items += items

    def load(self, step: int) -> None:
        self._loss = self._items = 0.0

    def _pull(self, action: Action) -> None:
        step = self.step_number
        self.lookups.load(step)
        if step + 1 < self._until:
            self.lookups.ask(step + 1, step + 1)

    def _push(self, action: Action) -> None:
        rows = self.lookups.gradients()
        check_rows(rows, self.step_number, self.mesh.rank)
        pushed = {self._numbers[name]: each for name, each in rows.items()}
        assert isinstance(self.lookups.source, ServedRows)
        rate, read = self.rate(self.step_number), self.lookups.source.versions
        self.client.push(self.step_number, self._items, self._loss, rate, rows=pushed, read=read)

    def _sum_rows(self) -> None:
        """The servers do."""
