"""A rank that holds parameters and answers: it polls all workers and never waits for one.

What a worker asks is read in its order, one request at a time. Pulls that may not be answered yet are parked until the
clock lets them through. Dense values are sent from where they lie; until they have left, nothing is applied.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hpctrain.comm import messages
from hpctrain.comm.messages import HEADER_BYTES, Header
from hpctrain.comm.outbox import Outbox
from hpctrain.comm.progress import Backoff
from hpctrain.comm.roles import Roles
from hpctrain.train.iteration import Refused
from hpctrain.train.memory import MessageMemory
from hpctrain.train.service import Description, as_bytes, build_dense, build_tables
from hpctrain.train.shard import Shard


class ParameterServer:
    """Serves the workers of `roles` until the last of them is done. Collective with their ServiceClient, or with one
    who says that there will be none.

    `record`: a text file to write the log to, one JSON object a line, where the settings ask for one.
    """

    def __init__(self, roles: Roles, record=None):
        assert roles.is_server, "a worker makes a client"
        self._roles, self._comm, self._record = roles, roles.everybody.comm, record
        self.outbox = Outbox(self._comm, roles.progress)
        self._refused: set[int] = set()  # workers of whose iteration a part was refused, and the rest is still to come
        self._leaving: list[Any] = []  # requests that send values from where they lie
        self.num_requests = self.peak_queue = 0
        self._moved, self._memory = False, MessageMemory()
        told = roles.everybody.broadcast_json(None)
        self.description = Description.from_json(told) if told else None
        if self.description is None:
            return
        self._dtype = self.description.torch_dtype
        self._part = self.description.parts[roles.server]
        self.shard = Shard(
            self.description.settings,
            build_dense(self.description, roles.server, self._initial_values()),
            build_tables(self.description, roles.server, roles.num_servers),
            roles.num_workers,
            self._note,
            self._log if self.description.settings.record else None,
        )

    def serve(self) -> dict:
        """Answers until all workers are done; returns figures of this server, none where there was nothing to do."""
        if self.description is None:
            return {}
        listening = {worker: self._listen(worker) for worker in range(self._roles.num_workers)}
        backoff, began, busy = Backoff(), time.perf_counter(), 0.0
        while listening or not self.outbox.poll():
            self._moved, start = False, time.perf_counter()
            for worker, conversation in list(listening.items()):
                if next(conversation, StopIteration) is StopIteration:
                    del listening[worker]
                    self._moved = True
            self.outbox.poll()
            if self._moved:
                busy, backoff = busy + time.perf_counter() - start, Backoff()
            else:
                backoff.pause()
        return self._figures(time.perf_counter() - began, busy)

    def _figures(self, seconds: float, busy: float) -> dict:
        shard = self.shard
        return {
            "requests": self.num_requests,
            "requests_per_second": self.num_requests / seconds if seconds else None,
            "peak_queue": self.peak_queue,
            "busy_share": busy / seconds if seconds else None,
            "updates": shard.version,
            "clock_gaps": {str(gap): count for gap, count in sorted(shard.gaps.items())},
            "lags": {str(lag): count for lag, count in sorted(shard.lags.items())},
            "rows": {table.name: table.num_touched for table in shard.tables},
        }

    # ---- conversations: each yields where it would have to wait

    def _listen(self, worker: int) -> Iterator[None]:
        while True:
            data = np.empty(HEADER_BYTES, np.uint8)
            yield from self._receive(worker, data, messages.TO_SERVER)
            header = Header.unpack(data)
            self.num_requests += 1
            if header.kind == messages.DONE:
                yield from self._leave()
                self._safely(worker, header, lambda: self.shard.retire(worker))
                self._release()
                answer = Header(messages.DONE)  # nothing follows
                self.outbox.post(worker, messages.TO_WORKER, answer.pack(), control=True)
                return
            if header.kind == messages.PULL:
                yield from self._pull(worker, header)
            elif header.kind == messages.PUSH:
                yield from self._push(worker, header)
            else:
                yield from self._finish(worker, header)

    def _receive(self, worker: int, data: np.ndarray, tag: int) -> Iterator[None]:
        for request in [self._comm.Irecv(data[piece], worker, tag) for piece in messages.pieces(data.nbytes)]:
            while not request.Test():
                yield
        self._moved = True

    def _pull(self, worker: int, header: Header) -> Iterator[None]:
        ids = None
        if header.table >= 0 and self.description.settings.update == "server":
            ids = np.empty(header.count, np.int64)
            yield from self._receive(worker, ids.view(np.uint8), messages.IDS)
        own = header.clock if header.own < 0 else header.own
        bound = None if header.bound < 0 else header.bound
        clock = self.shard.clock
        if clock.admits(worker, header.clock, bound, own):
            self._answer(worker, header, ids)
        else:
            clock.park(worker, header.clock, (worker, header, ids), bound, own)
            self.peak_queue = max(self.peak_queue, clock.num_parked)

    def _push(self, worker: int, header: Header) -> Iterator[None]:
        ids = values = touched = None
        if header.table >= 0:
            ids = np.empty(header.count, np.int64)
            yield from self._receive(worker, ids.view(np.uint8), messages.IDS)
            width = self.description.tables[header.table].width if header.table < len(self.shard.tables) else 0
            values = self._memory.empty(header.count, width, dtype=self._dtype)
            ids = torch.from_numpy(ids)
        else:
            if header.flags & messages.PARTLY:
                touched = np.empty(len(self._part.segments), np.uint8)
                yield from self._receive(worker, touched, messages.IDS)
                touched = touched.astype(bool).tolist()
            values = self._memory.empty(header.count, dtype=self._dtype)
        yield from self._receive(worker, as_bytes(values), messages.PUSHED)
        parts = header.clock, header.table, touched, ids, values
        if worker not in self._refused and self._safely(worker, header, lambda: self.shard.stage(worker, *parts)):
            self._refused.add(worker)

    def _finish(self, worker: int, header: Header) -> Iterator[None]:
        if worker in self._refused:
            self._refused.discard(worker)
            self.shard.drop(worker)
            return
        yield from self._leave()
        suspect = bool(header.flags & messages.SUSPECT)
        how = header.clock, header.items, header.loss, header.lr, header.bound, suspect
        self._safely(worker, header, lambda: self.shard.finish(worker, *how))
        self._release()

    def _leave(self) -> Iterator[None]:
        """Returns when the values that are sent from where they lie have left: something may be applied."""
        while not all(request.Test() for request in self._leaving):
            yield
        self._leaving.clear()

    def _safely(self, worker: int, header: Header, call) -> bool:
        """Whether it was refused, which the worker is told."""
        try:
            call()
        except Refused as error:
            self._refuse(worker, header, str(error))
            return True
        return False

    def _release(self) -> None:
        for worker, header, ids in self.shard.clock.release():
            self._answer(worker, header, ids)

    # ---- answers

    def _answer(self, worker: int, header: Header, ids: np.ndarray | None) -> None:
        if self.description.settings.update == "worker":
            self._answer_gradient(worker, header)
            return
        try:
            if header.table >= 0:
                self._answer_rows(worker, header, ids)
            else:
                self._answer_dense(worker, header)
        except Refused as error:
            self._refuse(worker, header, str(error))

    def _answer_rows(self, worker: int, header: Header, ids: np.ndarray) -> None:
        """Raises Refused."""
        ids, create = torch.from_numpy(ids), not header.flags & messages.LOOKS
        values = self.shard.rows(worker, header.clock, header.table, ids, create, self._memory.empty)
        self.shard.served(worker, header.clock, header.table)
        self._reply(worker, header, len(values))
        self.outbox.post(worker, messages.answer_tag(header.request), as_bytes(values))

    def _answer_dense(self, worker: int, header: Header) -> None:
        """Raises Refused."""
        values = self._dense_values()
        if header.count != len(values):
            wanted = f"{header.count} dense values, this server has {len(values)}"
            raise Refused(f"worker {worker} clock {header.clock}: asked for {wanted}")
        self.shard.served(worker, header.clock, header.table)
        live = not header.flags & messages.AHEAD
        self._reply(worker, header, len(values))
        values = values if live else values.clone()
        request = self.outbox.post(worker, messages.answer_tag(header.request), as_bytes(values))
        if live:
            self._leaving.append(request)

    def _answer_gradient(self, worker: int, header: Header) -> None:
        """The gradient of the last update, for workers that step by themselves."""
        update, tag = self.shard.last, messages.answer_tag(header.request)
        self.shard.served(worker, header.clock, header.table)
        if header.table >= 0:
            ids, rows = update.rows.get(header.table, (torch.empty(0, dtype=torch.int64), None))
            self._reply(worker, header, len(ids), update.items, update.loss)
            if len(ids):
                self.outbox.post(worker, tag, as_bytes(ids))
                self.outbox.post(worker, tag, as_bytes(rows.contiguous()))
            return
        touched = [False] * len(self._part.segments) if update.dense is None else update.touched
        touched = [True] * len(self._part.segments) if touched is None else touched
        dense = self._dense_values().new_zeros(len(self._part)) if update.dense is None else update.dense
        self._reply(worker, header, len(dense), update.items, update.loss)
        if self._part.segments:
            self.outbox.post(worker, tag, np.array(touched, np.uint8))
            self._leaving.append(self.outbox.post(worker, tag, as_bytes(dense)))

    def _dense_values(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype) if self.shard.dense is None else self.shard.dense.values

    def _reply(self, worker: int, header: Header, count: int, items: float = 0.0, loss: float = 0.0) -> None:
        answer = Header(
            messages.VALUES,
            header.table,
            header.request,
            self.shard.clock.min_clock,
            count,
            bound=self.shard.version,
            items=items,
            loss=loss,
        )
        self.outbox.post(worker, messages.TO_WORKER, answer.pack(), control=True)

    def _refuse(self, worker: int, header: Header, why: str) -> None:
        text = np.frombuffer(why.encode(), np.uint8)
        answer = Header(messages.REFUSED, header.table, header.request, header.clock, len(text))
        self.outbox.post(worker, messages.TO_WORKER, answer.pack(), control=True)
        self.outbox.post(worker, messages.TEXT, text, control=True)

    def _note(self, clock: int, loss: float, items: float) -> None:
        """Tells worker 0 of a round that all have finished; the first server does."""
        if self._roles.server == 0 and self.shard.clock.running[0]:
            self.outbox.post(0, messages.NOTES, np.array([clock, loss, items]).view(np.uint8), control=True)

    # ---- beginning

    def _initial_values(self) -> torch.Tensor:
        """What worker 0 begins with."""
        values = self._memory.empty(len(self._part), dtype=self._dtype)
        if self._part.segments:
            self._roles.progress.wait(self._comm.Irecv(as_bytes(values), 0, messages.START).Test)
        return values

    def _log(self, event: dict) -> None:
        self._record.write(json.dumps(event) + "\n")
