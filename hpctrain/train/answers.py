"""What a server sends to its workers: values, gradients, refusals. Nothing here waits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpctrain.comm import messages
from hpctrain.comm.messages import Header
from hpctrain.comm.outbox import Outbox
from hpctrain.train.iteration import Refused
from hpctrain.train.memory import MessageMemory
from hpctrain.train.service import as_bytes
from hpctrain.train.shard import Shard


class Answers:
    """Of one `shard`, to whom a message of this `outbox` goes. Dense values are sent from where they lie."""

    def __init__(
        self,
        shard: Shard,
        outbox: Outbox,
        memory: MessageMemory,
        dtype: torch.dtype,
        was_asked: Callable[[], bool] = lambda: False,
    ):
        self._was_asked = was_asked
        self._shard, self._outbox, self._memory, self._dtype = shard, outbox, memory, dtype
        self._leaving: list[Any] = []  # requests that send values from where they lie
        self.holds = 0  # who waits until those have left; meanwhile copies are sent, or that might never be

    def have_left(self) -> bool:
        """Whether the dense values may change."""
        if all(request.Test() for request in self._leaving):
            self._leaving.clear()
        return not self._leaving

    def done(self, worker: int) -> None:
        """Nothing follows."""
        self._outbox.post(worker, messages.TO_WORKER, Header(messages.DONE).pack(), control=True)

    def answer(self, worker: int, header: Header, ids: np.ndarray | None) -> None:
        if self._shard.settings.update == "worker":
            self._answer_gradient(worker, header)
            return
        try:
            if header.table >= 0:
                self._answer_rows(worker, header, ids)
            else:
                self._answer_dense(worker, header)
        except Refused as error:
            self.refuse(worker, header, str(error))

    def _answer_rows(self, worker: int, header: Header, ids: np.ndarray) -> None:
        """Raises Refused."""
        ids, create = torch.from_numpy(ids), not header.flags & messages.LOOKS
        values = self._shard.rows(worker, header.clock, header.table, ids, create, self._memory.empty)
        self._shard.served(worker, header.clock, header.table, counts=create)
        self._reply(worker, header, len(values))
        self._outbox.post(worker, messages.answer_tag(header.request), as_bytes(values))

    def _answer_dense(self, worker: int, header: Header) -> None:
        """Raises Refused."""
        values = self._dense_values()
        if header.count != len(values):
            wanted = f"{header.count} dense values, this server has {len(values)}"
            raise Refused(f"worker {worker} clock {header.clock}: asked for {wanted}")
        self._shard.served(worker, header.clock, header.table)
        live = not header.flags & messages.AHEAD and not self.holds
        self._reply(worker, header, len(values))
        if not live:
            values = self._memory.empty(len(values), dtype=self._dtype).copy_(values)
        requests = self._outbox.post(worker, messages.answer_tag(header.request), as_bytes(values))
        if live:
            self._leaving += requests

    def _answer_gradient(self, worker: int, header: Header) -> None:
        """The gradient of the last update, for workers that step by themselves."""
        update, tag = self._shard.last, messages.answer_tag(header.request)
        self._shard.served(worker, header.clock, header.table)
        if header.table >= 0:
            ids, rows = update.rows.get(header.table, (torch.empty(0, dtype=torch.int64), None))
            self._reply(worker, header, len(ids), update.items, update.loss)
            if len(ids):
                self._outbox.post(worker, tag, as_bytes(ids))
                self._outbox.post(worker, tag, as_bytes(rows.contiguous()))
            return
        values, num_segments = self._dense_values(), self._shard.num_segments
        touched = [False] * num_segments if update.dense is None else update.touched
        touched = [True] * num_segments if touched is None else touched
        dense = torch.zeros_like(values) if update.dense is None else update.dense
        self._reply(worker, header, len(dense), update.items, update.loss)
        if num_segments:
            self._outbox.post(worker, tag, np.array(touched, np.uint8))
            self._outbox.post(worker, tag, as_bytes(dense))  # which nobody writes to: each update has its own

    def _dense_values(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype) if self._shard.dense is None else self._shard.dense.values

    def _reply(self, worker: int, header: Header, count: int, items: float = 0.0, loss: float = 0.0) -> None:
        answer = header._replace(kind=messages.VALUES, count=count, version=self._shard.version, items=items, loss=loss)
        answer = answer._replace(flags=messages.ASKED if self._was_asked() else 0)
        self._outbox.post(worker, messages.TO_WORKER, answer.pack(), control=True)

    def tell(self, worker: int, text: str) -> None:
        """Answers KEEP."""
        data = np.frombuffer(text.encode(), np.uint8)
        self._outbox.post(worker, messages.TO_WORKER, Header(messages.TOLD, count=len(data)).pack(), control=True)
        self._outbox.post(worker, messages.TEXT, data, control=True)

    def refuse(self, worker: int, header: Header, why: str) -> None:
        text = np.frombuffer(why.encode(), np.uint8)
        answer = Header(messages.REFUSED, header.table, header.request, header.clock, len(text))
        self._outbox.post(worker, messages.TO_WORKER, answer.pack(), control=True)
        self._outbox.post(worker, messages.TEXT, text, control=True)
