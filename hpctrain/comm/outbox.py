"""What a rank has sent: kept in memory until it has left, counted, and held back where the other side is behind."""

from collections import deque
from typing import Any

import numpy as np

from hpctrain.comm.progress import Progress

MOST_UNREAD = 16  # notices that a rank has yet to come to


class Outbox:
    """Messages of this rank over `comm`, none of which blocks but where one rank has too many notices to read."""

    def __init__(self, comm, progress: Progress):
        self._comm, self._progress = comm, progress
        self._sent: deque[tuple[Any, np.ndarray]] = deque()
        self._unread: dict[int, deque[tuple[Any, np.ndarray]]] = {}
        self.bytes_sent = self.messages_sent = self.control_messages = 0

    def post(self, rank: int, tag: int, data: np.ndarray, control: bool = False) -> Any:
        """Begins to send bytes, which may not be written to until the request that is returned is done."""
        request = self._comm.Isend(data, rank, tag)
        self._sent.append((request, data))
        if control:
            self.control_messages += 1
        else:
            self.messages_sent += 1
            self.bytes_sent += data.nbytes
        return request

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
