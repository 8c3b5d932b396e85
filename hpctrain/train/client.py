"""A worker's side of the parameter service: pulls and pushes that are under way while it computes.

A push is one iteration: everything that is sent with it counts together. A pull says at which clock it reads; the
server answers when the others are near enough.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from hpctrain.comm import messages
from hpctrain.comm.abort import RankFailed, last_words
from hpctrain.comm.messages import Header
from hpctrain.comm.outbox import Outbox
from hpctrain.comm.roles import Roles
from hpctrain.plan.sharding import DensePart
from hpctrain.train.line import Line
from hpctrain.train.memory import MessageMemory
from hpctrain.train.notes import Notes
from hpctrain.train.pull import Part, Pull, copy_rows
from hpctrain.train.service import Description


class ServiceClient:
    """Of a worker. Worker 0's `description` and first values of the arena go to all servers; RankFailed where another
    worker's differs. Collective with the ParameterServer of each server, and with the other workers.
    """

    def __init__(self, roles: Roles, description: Description, initial: torch.Tensor):
        assert not roles.is_server, "a server makes a ParameterServer"
        if roles.client is not None and not roles.client.closed:
            raise ValueError("these roles have a client already; call its done() first")
        self._rank, self.progress = roles.rank, roles.progress
        told = roles.everybody.broadcast_json(description.to_json() if roles.rank == 0 else None)
        self.description = Description.from_json(told)
        description.check_same(self.description, roles.rank)
        self._pulls: dict[int, Pull] = {}  # by request
        self._next = 0
        self.outbox = Outbox(roles.everybody.comm, self.progress)
        self._dense_sends: list[Any] = []
        self._memory = MessageMemory()
        self.lines = [Line(each, roles.rank_of_server(each), self.outbox) for each in range(roles.num_servers)]
        self._rounds = Notes(roles.everybody.comm, self.lines[0].rank) if roles.rank == 0 else None
        self.notes = self._rounds.notes if self._rounds else deque()
        self.closed, roles.client = False, self
        self.servers_asked = False  # by a signal, to leave
        self._broken: RankFailed | None = None
        self.seconds_waited = 0.0  # for what servers send or take
        self._forget = last_words(self._last_words)
        for line, part in self._parts() if roles.rank == 0 else ():
            if part.segments:
                line.post(messages.START, initial[part.start : part.stop].contiguous())
        self.progress.wait(self.outbox.poll)

    # ---- asking

    def pull(self, clock: int, into: torch.Tensor, *, bound: int | None = None, ahead: bool = False) -> Pull:
        """Asks for the dense arena, which arrives in `into` (flat, contiguous), as it may be read at `clock`.

        `bound` in place of the settings' staleness; `ahead`: it may take a while until this worker looks for it.
        """
        pull = Pull(messages.DENSE, self.poll, self._wait, into)
        flags = messages.AHEAD if ahead else 0
        for line, part in self._parts():
            memory = [into[part.start : part.stop]] if part.segments else []
            if self._steps_here and memory:
                memory.insert(0, np.empty(len(part.segments), np.uint8))
            if part.segments or self._steps_here:
                header = Header(messages.PULL, messages.DENSE, 0, clock, len(part), _or(bound), flags=flags)
                self._ask(pull, line, header, memory)
        return pull

    def pull_rows(
        self, table: int, ids: torch.Tensor, clock: int, *, bound: int | None = None, create: bool = True
    ) -> Pull:
        """Asks for rows of a table: int64 `ids` (n,), distinct; `values` will be (n, width).

        Rows that nobody has pushed are created, or with `create` False made up for this once.
        """
        width = self.description.tables[table].width
        pull = Pull(table, self.poll, self._wait, self._empty(len(ids), width))
        flags = 0 if create else messages.LOOKS
        for line, chosen in self._shared_out(ids):
            wanted = copy_rows(ids, chosen, self._memory.empty)
            if len(wanted):
                rows = pull.values if chosen is None else self._empty(len(wanted), width)
                header = Header(messages.PULL, table, 0, clock, len(wanted), _or(bound), flags=flags)
                self._ask(pull, line, header, [rows], chosen)
                line.post(messages.IDS, wanted)
        return pull

    def pull_gradient(self, table: int, clock: int) -> Pull:
        """Asks for the sum of what was pushed to the rows of a table in the round before, where the workers step."""
        pull = Pull(table, self.poll, self._wait, self._empty(0, self.description.tables[table].width))
        pull.ids = torch.empty(0, dtype=torch.int64)
        for line in self.lines:
            self._ask(pull, line, Header(messages.PULL, table, 0, clock), None)
        return pull

    # ---- telling

    def push(
        self,
        clock: int,
        items: float,
        loss: float,
        lr: float,
        dense: torch.Tensor | None = None,
        touched: Sequence[bool] | None = None,
        rows: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        read: Mapping[int, int] | None = None,
    ) -> None:
        """Sends an iteration: sums over `items` of the dense gradients (the arena) and of rows (ids and sums by table).

        `read`: by server, the updates that its weights held, else those of the last pull. `touched`: by segment.
        `dense` may not be written to before `wait_sent`. ValueError for what has not the service's shapes or dtype.
        """
        self.description.check_push(rows or {}, dense)
        finite = [True] * len(self.lines)
        for table, (ids, sums) in sorted((rows or {}).items()):
            for line, chosen in self._shared_out(ids):
                pushed = copy_rows(ids, chosen, self._memory.empty)
                if len(pushed):
                    self.tell(line, Header(messages.PUSH, table, 0, clock, len(pushed)))
                    line.post(messages.IDS, pushed)
                    finite[line.server] &= line.post_gradients(copy_rows(sums, chosen, self._memory.empty))[0]
        masks = iter(touched or ())
        for line, part in self._parts():
            if dense is not None and part.segments:
                mask = list(islice(masks, len(part.segments)))
                finite[line.server] &= self._push_dense(line, clock, dense[part.start : part.stop], mask)
            flags = 0 if finite[line.server] else messages.SUSPECT
            header = Header(messages.FINISH, messages.DENSE, 0, clock, items=items, loss=loss, lr=lr, flags=flags)
            self.tell(line, header._replace(version=(read or {}).get(line.server, -1)))

    def _push_dense(self, line: Line, clock: int, values: torch.Tensor, touched: list[bool]) -> bool:
        """Whether they are finite."""
        flags = 0 if all(touched) else messages.PARTLY
        self.tell(line, Header(messages.PUSH, messages.DENSE, 0, clock, len(values), flags=flags))
        if flags:
            line.post(messages.IDS, np.array(touched, np.uint8))
        finite, requests = line.post_gradients(values)
        self._dense_sends += requests
        return finite

    def wait_sent(self) -> None:
        """Returns when the dense gradients of the last push have left."""
        self._wait(lambda: self.poll() or all(request.Test() for request in self._dense_sends))
        self._dense_sends.clear()

    def done(self) -> None:
        """This worker leaves: nobody waits for it any more. RankFailed where a server refuses something meanwhile."""
        if self.closed:
            return
        self._broken = None
        for line in self.lines:
            self.tell(line, Header(messages.DONE))
        self.progress.wait(lambda: self.poll() or (all(line.over for line in self.lines) and self.outbox.poll()))
        for pull in list(self._pulls.values()):
            pull.take_back()
        self.closed = True
        self._forget()
        self.progress.remove(self)
        for line in self.lines:
            line.close()
        if self._rounds is not None:
            self._rounds.close()

    # ---- progress

    def poll(self) -> bool:
        """Takes what has arrived; False, for a service is never done. RankFailed once a server has refused."""
        if self.closed:
            return True
        if self._broken:
            raise self._broken
        try:
            self._take_all()
        except RankFailed as error:
            self._broken = error
            raise
        return False

    def _take_all(self) -> None:
        self.outbox.poll()
        for line in self.lines:
            for header in line.answers():
                self._take(line, header)
        for request, pull in list(self._pulls.items()):
            pull.look()
            if pull.done:
                del self._pulls[request]
        if self._rounds is not None:
            self._rounds.poll()

    def _take(self, line: Line, header: Header) -> None:
        pull = self._pulls[header.request]
        self.servers_asked |= bool(header.flags & messages.ASKED)
        pull.versions[line.server], part = header.version, pull.parts[line.server]
        part.answered = True
        if self._steps_here:
            pull.items, pull.loss = header.items, header.loss
        if part.requests is None:
            ids, rows = torch.empty(header.count, dtype=torch.int64), self._empty(header.count, pull.values.shape[1])
            part.memory = [ids, rows] if header.count else []
            part.requests = line.receive(header.request, part.memory)

    # ---- inside

    @property
    def _steps_here(self) -> bool:
        return self.description.settings.update == "worker"

    def _last_words(self) -> str:
        last = max((line.last for line in self.lines), key=lambda header: header.clock)
        what = self.description.name(last.table)
        return f"worker {self._rank} (rank {self._rank}) was at clock {last.clock}, its last word was of {what}"

    def _wait(self, poll: Callable[[], bool]) -> None:
        began = time.perf_counter()
        self.progress.wait(poll)
        self.seconds_waited += time.perf_counter() - began

    def _ask(self, pull: Pull, line: Line, header: Header, memory: list | None, chosen=None) -> None:
        request, self._next = self._next, self._next + 1
        self._pulls[request] = pull
        requests = None if memory is None else line.receive(request, memory)
        pull.parts[line.server] = Part(requests, memory or [], chosen)
        self.tell(line, header._replace(request=request))

    def tell(self, line: Line, header: Header) -> None:
        if self.closed:
            raise RuntimeError("this client is done; what it pulls and pushes comes before done()")
        if self._broken:
            raise self._broken
        line.tell(header)
        self.progress.add(self)

    def _parts(self) -> Iterator[tuple[Line, DensePart]]:
        return zip(self.lines, self.description.parts)

    def _shared_out(self, ids: torch.Tensor) -> list[tuple[Line, torch.Tensor | None]]:
        """By server: which of the ids are its own; None: all."""
        number = len(self.lines)
        if number == 1:
            return [(self.lines[0], None)]
        return [(line, (ids % number == line.server).nonzero()[:, 0]) for line in self.lines]

    def _empty(self, rows: int, width: int) -> torch.Tensor:
        return self._memory.empty(rows, width, dtype=self.description.torch_dtype)


def _or(value: int | None) -> int:
    """-1 for nothing, as headers have it."""
    return -1 if value is None else value
