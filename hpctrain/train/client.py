"""A worker's side of the parameter service: pulls and pushes that are under way while it computes.

A push is one iteration: everything that is sent with it counts together. A pull says at which clock it reads; the
server answers when the others are near enough.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpctrain.comm import messages
from hpctrain.comm.abort import RankFailed
from hpctrain.comm.messages import HEADER_BYTES, Header
from hpctrain.comm.outbox import Outbox
from hpctrain.comm.progress import take_back, wait_until
from hpctrain.comm.roles import Roles
from hpctrain.train.memory import MessageMemory
from hpctrain.train.notes import Notes
from hpctrain.train.pull import Part, Pull, copy_rows, shared_out
from hpctrain.train.service import Description, as_bytes


class ServiceClient:
    """Of a worker. `description` and the dense arena's first values are worker 0's word, told to all servers.

    Collective with the ParameterServer of each server, and with the other workers.
    """

    def __init__(self, roles: Roles, description: Description, initial: torch.Tensor):
        assert not roles.is_server, "a server makes a ParameterServer"
        self._roles, self._comm, self.progress = roles, roles.everybody.comm, roles.progress
        told = roles.everybody.broadcast_json(description.to_json() if roles.rank == 0 else None)
        self.description = Description.from_json(told)
        self._servers = range(roles.num_servers)
        self._pulls: dict[int, Pull] = {}  # by request
        self._next = 0
        self.outbox = Outbox(self._comm, self.progress)
        self._dense_sends: list[Any] = []
        self._memory = MessageMemory()
        self._answers = {server: self._listen(server) for server in self._servers}
        self._rounds = Notes(self._comm, self._rank(0)) if roles.rank == 0 else None
        self.notes = self._rounds.notes if self._rounds else deque()
        self._closed, roles.client = False, self
        self._gone: set[int] = set()  # servers from which nothing follows
        for server, part in enumerate(self.description.parts if roles.rank == 0 else ()):
            if part.segments:
                self.outbox.post(
                    self._rank(server), messages.START, as_bytes(initial[part.start : part.stop].contiguous())
                )
        self.progress.wait(self.outbox.poll)

    # ---- asking

    def pull(
        self,
        clock: int,
        into: torch.Tensor,
        *,
        bound: int | None = None,
        own: int | None = None,
        ahead: bool = False,
    ) -> Pull:
        """Asks for the dense arena, which arrives in `into` (flat, contiguous), as it may be read at `clock`.

        `bound` in place of the settings' staleness; `own`: how many of this worker's iterations must be in it, default
        `clock`; `ahead`: it may take a while until this worker looks for it.
        """
        pull = self._pull(clock, messages.DENSE, into)
        flags = messages.AHEAD if ahead else 0
        for server in self._servers:
            part = self.description.parts[server]
            memory = [into[part.start : part.stop]] if part.segments else []
            if self._steps_here and memory:
                memory.insert(0, np.empty(len(part.segments), np.uint8))
            if part.segments or self._steps_here:
                header = Header(messages.PULL, messages.DENSE, 0, clock, len(part), _or(bound), _or(own), flags=flags)
                self._ask(pull, server, header, memory)
        return pull

    def pull_rows(
        self,
        table: int,
        ids: torch.Tensor,
        clock: int,
        *,
        bound: int | None = None,
        own: int | None = None,
        create: bool = True,
    ) -> Pull:
        """Asks for rows of a table: int64 `ids` (n,), distinct; `values` will be (n, width).

        Rows that nobody has pushed are created, or with `create` False made up for this once.
        """
        width = self.description.tables[table].width
        pull, flags = self._pull(clock, table, self._empty(len(ids), width)), 0 if create else messages.LOOKS
        for server, chosen in shared_out(ids, len(self._servers)):
            wanted = copy_rows(ids, chosen, self._memory.empty)
            if len(wanted):
                rows = pull.values if chosen is None else self._empty(len(wanted), width)
                header = Header(messages.PULL, table, 0, clock, len(wanted), _or(bound), _or(own), flags=flags)
                self._ask(pull, server, header, [rows], chosen)
                self.outbox.post(self._rank(server), messages.IDS, as_bytes(wanted))
        return pull

    def pull_gradient(self, table: int, clock: int) -> Pull:
        """Asks for the sum of what was pushed to the rows of a table in the round before, where the workers step."""
        pull = self._pull(clock, table, self._empty(0, self.description.tables[table].width))
        pull.ids = torch.empty(0, dtype=torch.int64)
        for server in self._servers:
            self._ask(pull, server, Header(messages.PULL, table, 0, clock), None)
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
        `dense` may not be written to before `wait_sent`.
        """
        suspect = set()  # servers that should look for NaN and infinity
        for table, (ids, sums) in sorted((rows or {}).items()):
            for server, chosen in shared_out(ids, len(self._servers)):
                pushed = copy_rows(ids, chosen, self._memory.empty)
                if len(pushed):
                    self._tell(server, Header(messages.PUSH, table, 0, clock, len(pushed)))
                    self.outbox.post(self._rank(server), messages.IDS, as_bytes(pushed))
                    if not self._send(server, copy_rows(sums, chosen, self._memory.empty)):
                        suspect.add(server)
        rest = list(touched or ())
        for server in self._servers:
            part = self.description.parts[server]
            mask, rest = rest[: len(part.segments)], rest[len(part.segments) :]
            if dense is not None and part.segments and not self._push_dense(server, clock, dense, mask):
                suspect.add(server)
            flags = messages.SUSPECT if server in suspect else 0
            header = Header(messages.FINISH, messages.DENSE, 0, clock, items=items, loss=loss, lr=lr, flags=flags)
            self._tell(server, header._replace(bound=(read or {}).get(server, -1)))

    def _push_dense(self, server: int, clock: int, dense: torch.Tensor, touched: list[bool]) -> bool:
        """One server's part; False where something may not be finite."""
        part, flags = self.description.parts[server], 0 if all(touched) else messages.PARTLY
        self._tell(server, Header(messages.PUSH, messages.DENSE, 0, clock, len(part), flags=flags))
        if flags:
            self.outbox.post(self._rank(server), messages.IDS, np.array(touched, np.uint8))
        return self._send(server, dense[part.start : part.stop], self._dense_sends)

    def _send(self, server: int, values: torch.Tensor, requests: list | None = None) -> bool:
        """Each worker looks at its own gradients, while the piece before travels; a server would have all to do."""
        finite = True
        memory = as_bytes(values)
        for cut in messages.pieces(values.nbytes):
            piece = memory[cut]
            numbers = torch.from_numpy(piece).view(values.dtype)
            finite = finite and bool(torch.isfinite(numbers.sum()))  # false too where only the sum is too large
            request = self.outbox.post(self._rank(server), messages.PUSHED, piece)
            if requests is not None:
                requests.append(request)
        return finite

    def wait_sent(self) -> None:
        """Returns when the dense gradients of the last push have left."""
        self.progress.wait(lambda: self.poll() or all(request.Test() for request in self._dense_sends))
        self._dense_sends.clear()

    def done(self) -> None:
        """This worker leaves: nobody waits for it any more. RankFailed where a server had refused something."""
        if self._closed:
            return
        for server in self._servers:
            self._tell(server, Header(messages.DONE))
        self.progress.wait(lambda: self.poll() or (len(self._gone) == len(self._servers) and self.outbox.poll()))
        self._closed = True
        self.progress.remove(self)
        take_back([request for request, _ in self._answers.values()])
        if self._rounds is not None:
            self._rounds.close()

    # ---- progress

    def poll(self) -> bool:
        """Takes what has arrived; False, for a service is never done. RankFailed where a server refused."""
        if self._closed:
            return True
        self.outbox.poll()
        for server in self._servers:
            while self._answers[server][0].Test():
                header = Header.unpack(self._answers[server][1])
                self._answers[server] = self._listen(server)
                self._take(server, header)
        for request, pull in list(self._pulls.items()):
            pull.look()
            if pull.done:
                del self._pulls[request]
        if self._rounds is not None:
            self._rounds.poll()
        return False

    def _take(self, server: int, header: Header) -> None:
        if header.kind == messages.REFUSED:
            text = np.empty(header.count, np.uint8)
            wait_until(self._comm.Irecv(text, self._rank(server), messages.TEXT).Test)
            raise RankFailed(f"server {server}: {text.tobytes().decode()}")
        if header.kind == messages.DONE:
            self._gone.add(server)
            return
        pull = self._pulls[header.request]
        pull.versions[server], part = header.bound, pull.parts[server]
        part.answered = True
        if self._steps_here:
            pull.items, pull.loss = header.items, header.loss
        if part.requests is None:
            ids, rows = torch.empty(header.count, dtype=torch.int64), self._empty(header.count, pull.values.shape[1])
            part.memory = [ids, rows] if header.count else []
            part.requests = self._receive(server, header.request, part.memory)

    # ---- inside

    @property
    def _steps_here(self) -> bool:
        return self.description.settings.update == "worker"

    def _pull(self, clock: int, table: int, values: torch.Tensor) -> Pull:
        return Pull(clock, table, self.poll, self.progress.wait, values)

    def _ask(self, pull: Pull, server: int, header: Header, memory: list | None, chosen=None) -> None:
        request, self._next = self._next, self._next + 1
        self._pulls[request] = pull
        requests = None if memory is None else self._receive(server, request, memory)
        pull.parts[server] = Part(requests, memory or [], chosen)
        self._tell(server, header._replace(request=request))
        self.progress.add(self)

    def _receive(self, server: int, request: int, memory: list) -> list:
        tag, rank = messages.answer_tag(request), self._rank(server)
        views = (each if isinstance(each, np.ndarray) else as_bytes(each) for each in memory)
        return [self._comm.Irecv(each, rank, tag) for each in views]

    def _tell(self, server: int, header: Header) -> None:
        self.outbox.notify(self._rank(server), messages.TO_SERVER, header.pack())
        self.progress.add(self)

    def _listen(self, server: int) -> tuple[Any, np.ndarray]:
        data = np.empty(HEADER_BYTES, np.uint8)
        return self._comm.Irecv(data, self._rank(server), messages.TO_WORKER), data

    def _empty(self, rows: int, width: int) -> torch.Tensor:
        return self._memory.empty(rows, width, dtype=self.description.torch_dtype)

    def _rank(self, server: int) -> int:
        return self._roles.rank_of_server(server)


def _or(value: int | None) -> int:
    """-1 for nothing, as headers have it."""
    return -1 if value is None else value
