"""A rank that holds parameters and answers: it polls all workers and never waits for one.

What a worker asks is read in its order, one request at a time. Pulls that may not be answered yet are parked until the
clock lets them through. Dense values are sent from where they lie; until they have left, nothing is applied.
"""

import json
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from hpctrain.comm import messages
from hpctrain.comm.abort import RankFailed
from hpctrain.comm.messages import HEADER_BYTES, Header
from hpctrain.comm.outbox import Outbox
from hpctrain.comm.progress import Backoff
from hpctrain.comm.roles import Roles
from hpctrain.train.answers import Answers
from hpctrain.train.background import Background
from hpctrain.train.iteration import Refused
from hpctrain.train.memory import MessageMemory
from hpctrain.train.served_state import ServedState
from hpctrain.train.service import Description, as_bytes, build_dense, build_tables
from hpctrain.train.shard import Shard


class ParameterServer:
    """Serves the workers of `roles` until the last of them is done. Collective with their ServiceClient, or with one
    who says that there will be none.

    `record`: a text file to write the log to, one JSON object a line, where the settings ask for one. `was_asked()`:
    whether a signal asks this server to leave, which the workers are told. `shard`: what it holds already, where other
    workers were lost before.
    """

    def __init__(
        self,
        roles: Roles,
        record=None,
        was_asked: Callable[[], bool] = lambda: False,
        shard: Shard | None = None,
    ):
        from mpi4py.MPI import Exception as MPIError

        assert roles.is_server, "a worker makes a client"
        self._mpi_error = MPIError
        self._roles, self._record = roles, record
        self.outbox = Outbox(roles.everybody.comm, roles.progress)
        self._refused: set[int] = set()  # workers of whose iteration a part was refused, and the rest is still to come
        self.num_requests = self.peak_queue = 0
        self._moved, self._memory = False, MessageMemory()
        self._last: dict[int, Header] = {}  # by worker
        told = roles.everybody.broadcast_json(None)
        self.description = Description.from_json(told) if told else None
        self.shard: Shard | None = None
        self.writing: Background | None = None
        if self.description is None:
            return
        self._dtype = self.description.torch_dtype
        self._part = self.description.parts[roles.server]
        self.shard, initial = shard, self._initial_values()
        log = self._log if self.description.settings.record else None
        if shard is not None:
            shard.speak_through(self._note, log)
        else:
            self.shard = self._build_shard(initial, log)
        self.answers = Answers(self.shard, self.outbox, self._memory, self._dtype, was_asked)
        self._state = ServedState(self.shard, self.description, roles.server, roles.num_servers)
        self.writing = self._state.background

    def _build_shard(self, initial: torch.Tensor, log: Callable[[dict], None] | None) -> Shard:
        description, roles = self.description, self._roles
        return Shard(
            description.settings,
            build_dense(description, roles.server, initial),
            build_tables(description, roles.server, roles.num_servers),
            roles.num_workers,
            self._note,
            log,
        )

    def serve(self) -> dict:
        """Answers until all workers are done; returns figures of this server, none where there was nothing to do."""
        if self.description is None:
            return {}
        listening = {worker: self._listen(worker) for worker in range(self._roles.num_workers)}
        backoff, began, busy = Backoff(), time.perf_counter(), 0.0
        while listening or not self.outbox.poll():
            self._moved, start = False, time.perf_counter()
            for worker in list(listening):
                if self._go_on(worker, listening[worker]):
                    del listening[worker]
            self._roles.progress.poll()
            self.outbox.poll()
            if self._moved:
                self._roles.progress.begin("serving")
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

    def _go_on(self, worker: int, conversation: Iterator[None]) -> bool:
        """Whether it is over."""
        over = next(conversation, StopIteration) is StopIteration
        self._moved = self._moved or over
        return over

    def _last_of(self, worker: int) -> str:
        """What is known of a worker: its rank, its clock, and what it spoke of last."""
        last = self._last.get(worker)
        spoke = "nothing said yet" if last is None else f"its last word was of {self.description.name(last.table)}"
        return f"worker {worker} (rank {worker}) at clock {self.shard.clock.clocks[worker]}, {spoke}"

    # ---- conversations: each yields where it would have to wait

    def _listen(self, worker: int) -> Iterator[None]:
        while True:
            data = np.empty(HEADER_BYTES, np.uint8)
            yield from self._receive(worker, data, messages.TO_SERVER)
            header = self._last[worker] = Header.unpack(data)
            self.num_requests += 1
            if header.kind == messages.DONE:
                yield from self._all_left()
                self.shard.retire(worker)
                self._release()
                self.answers.done(worker)
                return
            if header.kind == messages.PULL:
                yield from self._pull(worker, header)
            elif header.kind == messages.PUSH:
                yield from self._push(worker, header)
            elif header.kind == messages.KEEP:
                yield from self._keep(worker, header)
            else:
                yield from self._finish(worker, header)

    def _receive(self, worker: int, data: np.ndarray, tag: int) -> Iterator[None]:
        """RankFailed, one line, where MPI has lost the worker."""
        try:
            for request in self.outbox.expect(worker, tag, data):
                while not request.Test():
                    yield
        except self._mpi_error as error:
            raise RankFailed(f"server {self._roles.server} lost {self._last_of(worker)}: {error}") from None
        self._moved = True

    def _all_left(self) -> Iterator[None]:
        """Returns when the values that are sent from where they lie have left: something may be applied."""
        self.answers.holds += 1
        while not self.answers.have_left():
            yield
        self.answers.holds -= 1
        self._moved = True

    def _pull(self, worker: int, header: Header) -> Iterator[None]:
        ids = None
        if header.table >= 0 and self.description.settings.update == "server":
            ids = np.empty(header.count, np.int64)
            yield from self._receive(worker, ids.view(np.uint8), messages.IDS)
        bound = None if header.bound < 0 else header.bound
        clock = self.shard.clock
        if clock.admits(worker, header.clock, bound):
            self.answers.answer(worker, header, ids)
        else:
            clock.park(worker, header.clock, (worker, header, ids), bound)
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
        yield from self._all_left()
        suspect = bool(header.flags & messages.SUSPECT)
        how = header.clock, header.items, header.loss, header.lr, header.version, suspect
        self._safely(worker, header, lambda: self.shard.finish(worker, *how))
        self._release()

    def _keep(self, worker: int, header: Header) -> Iterator[None]:
        data = np.empty(header.count, np.uint8)
        yield from self._receive(worker, data, messages.IDS)
        yield from self._all_left()
        self.answers.tell(worker, json.dumps(self._state.answer(json.loads(data.tobytes()))))

    def _safely(self, worker: int, header: Header, call) -> bool:
        """Whether it was refused, which the worker is told."""
        try:
            call()
        except Refused as error:
            self.answers.refuse(worker, header, str(error))
            return True
        return False

    def _release(self) -> None:
        for worker, header, ids in self.shard.clock.release():
            self.answers.answer(worker, header, ids)

    # ---- inside

    def _note(self, clock: int, loss: float, items: float) -> None:
        """Tells worker 0 of a round that all have finished; the first server does."""
        if self._roles.server == 0 and self.shard.clock.running[0]:
            self.outbox.post(0, messages.NOTES, np.array([clock, loss, items]).view(np.uint8), control=True)

    def _initial_values(self) -> torch.Tensor:
        """What worker 0 begins with."""
        values = self._memory.empty(len(self._part), dtype=self._dtype)
        if self._part.segments:
            for request in self.outbox.expect(0, messages.START, as_bytes(values)):
                self._roles.progress.wait(request.Test)
        return values

    def _log(self, event: dict) -> None:
        self._record.write(json.dumps(event) + "\n")
