"""What worker 0 hears of rounds that all workers have finished: a server tells it unasked."""

from collections import deque
from typing import Any

import numpy as np

from hpctrain.comm.messages import NOTES
from hpctrain.comm.progress import take_back


class Notes:
    """From the rank `server` of `comm`. `notes`: clock, loss and items of each round, oldest first."""

    def __init__(self, comm, server: int):
        self._comm, self._server = comm, server
        self.notes: deque[tuple[int, float, float]] = deque()
        self._posted: tuple[Any, np.ndarray] = self._listen()

    def poll(self) -> None:
        """Takes what has arrived."""
        while self._posted[0].Test():
            clock, loss, items = self._posted[1].view(np.float64).tolist()
            self.notes.append((int(clock), loss, items))
            self._posted = self._listen()

    def close(self) -> None:
        """Nothing more will come."""
        take_back([self._posted[0]])

    def _listen(self) -> tuple[Any, np.ndarray]:
        data = np.empty(24, np.uint8)
        return self._comm.Irecv(data, self._server, NOTES), data
