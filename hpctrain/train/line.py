"""A worker's line to one server: what it says, sends and hears there."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hpctrain.comm import messages
from hpctrain.comm.abort import RankFailed
from hpctrain.comm.messages import HEADER_BYTES, Header
from hpctrain.comm.outbox import Outbox, pieces
from hpctrain.comm.progress import take_back, wait_until
from hpctrain.train.service import as_bytes


class Line:
    """To `server`, which is `rank` of `comm`."""

    def __init__(self, server: int, rank: int, outbox: Outbox):
        self.server, self.rank, self._outbox = server, rank, outbox
        self.last = Header(messages.PULL)  # what was said last
        self.over = False  # nothing follows
        self.told: str | None = None  # the last text that came
        self._posted: tuple[Any, np.ndarray] = self._listen()

    def tell(self, header: Header) -> None:
        self.last = header
        self._outbox.notify(self.rank, messages.TO_SERVER, header.pack())

    def post(self, tag: int, data: np.ndarray | torch.Tensor) -> list[Any]:
        """A payload of what was told; the requests that are done when it has left."""
        return self._outbox.post(self.rank, tag, data if isinstance(data, np.ndarray) else as_bytes(data))

    def post_gradients(self, values: torch.Tensor) -> tuple[bool, list[Any]]:
        """Whether all of it is finite, and requests. Each worker looks at its own; a server would have all to do."""
        finite, requests = True, []
        for piece in pieces(as_bytes(values)):  # while one travels, the next is looked at
            numbers = torch.from_numpy(piece).view(values.dtype)
            finite = finite and bool(torch.isfinite(numbers.sum()))  # false too where only the sum is too large
            requests += self.post(messages.PUSHED, piece)
        return finite, requests

    def receive(self, request: int, memory: list[np.ndarray | torch.Tensor]) -> list[Any]:
        """The payloads that answer a request; what is done when they are there."""
        tag = messages.answer_tag(request)
        views = (each if isinstance(each, np.ndarray) else as_bytes(each) for each in memory)
        return [each for view in views for each in self._outbox.expect(self.rank, tag, view)]

    def answers(self) -> Iterator[Header]:
        """Those that have arrived. RankFailed where the server refused something."""
        while self._posted[0].Test():
            header = Header.unpack(self._posted[1])
            self._posted = self._listen()
            if header.kind in (messages.REFUSED, messages.TOLD):
                text = np.empty(header.count, np.uint8)
                for request in self._outbox.expect(self.rank, messages.TEXT, text):
                    wait_until(request.Test)
                self.told = text.tobytes().decode()
                if header.kind == messages.REFUSED:
                    raise RankFailed(f"server {self.server}: {self.told}")
            elif header.kind == messages.DONE:
                self.over = True
            else:
                yield header

    def close(self) -> None:
        """Nothing is expected any more."""
        take_back([self._posted[0]])

    def _listen(self) -> tuple[Any, np.ndarray]:
        data = np.empty(HEADER_BYTES, np.uint8)
        return self._outbox.expect(self.rank, messages.TO_WORKER, data)[0], data
