"""What a rank has sent: kept in memory until it has left, counted, and held back where the other side is behind."""

from collections import deque
from typing import Any

import numpy as np

from hpctrain.comm.progress import Progress

MOST_UNREAD = 16  # notices that a rank has yet to come to
PIECE_BYTES = 4 << 20  # of a payload: while one piece travels, the next can be looked at, and no count is near 2^31


def pieces(data: np.ndarray) -> list[np.ndarray]:
    """What of a payload in bytes travels as a message each; none of an empty one."""
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


class Outbox:
    """Messages of this rank over `comm`, none of which blocks but where one rank has too many notices to read."""

    def __init__(self, comm, progress: Progress):
        self._comm, self._progress = comm, progress
        self._sent: deque[tuple[Any, np.ndarray]] = deque()
        self._unread: dict[int, deque[tuple[Any, np.ndarray]]] = {}
        self.bytes_sent = self.messages_sent = self.control_messages = 0

    def post(self, rank: int, tag: int, data: np.ndarray, control: bool = False) -> list[Any]:
        """Begins to send bytes, in `pieces`; they may not be written to until the requests returned are done."""
        sent = [(self._comm.Isend(piece, rank, tag), piece) for piece in pieces(data)]
        self._sent += sent
        if control:
            self.control_messages += len(sent)
        else:
            self.messages_sent += len(sent)
            self.bytes_sent += data.nbytes
        return [request for request, _ in sent]

    def expect(self, rank: int, tag: int, data: np.ndarray) -> list[Any]:
        """Begins to receive what a rank posts; the requests that are done when it is there."""
        return [self._comm.Irecv(piece, rank, tag) for piece in pieces(data)]

    def notify(self, rank: int, tag: int, data: np.ndarray) -> None:
        """As `post`, of a notice, which has left when the rank has read it; waits while too many are unread."""
        unread = self._unread.setdefault(rank, deque())
        if len(unread) >= MOST_UNREAD:
            self._progress.wait(lambda: self.poll() or len(unread) < MOST_UNREAD)
        unread.append((self._comm.Issend(data, rank, tag), data))
        self.control_messages += 1

    def poll(self) -> bool:
        """Forgets what has left; True when all has."""
        for _ in range(len(self._sent)):
            request, data = self._sent.popleft()
            if not request.Test():
                self._sent.append((request, data))
        for unread in self._unread.values():
            while unread and unread[0][0].Test():
                unread.popleft()
        return not self._sent and not any(self._unread.values())
