"""Ranks that do something together, and the small exchanges of set-up and end: barrier, broadcast, gathering of facts.

Only non-blocking collectives, waited for politely. Facts travel as JSON: nothing is pickled.
A group without a communicator is one rank alone; it needs no MPI.
"""

import json

import numpy as np

from hpctrain.comm.buffer import as_host_buffer
from hpctrain.comm.nodes import allocate_shared
from hpctrain.comm.progress import Progress
from hpctrain.comm.ring import Ring

PIECE_BYTES = 64 << 20  # a broadcast is cut, so that no count comes near 2^31


class Group:
    """All ranks of `comm`, or this process alone (`comm` None). The communicator must be private to it.

    Every method is collective, and raises CollectiveMismatch on all ranks where they call different ones.
    """

    def __init__(self, comm=None, progress: Progress | None = None):
        self.comm = comm
        self.rank, self.size = (comm.rank, comm.size) if comm is not None else (0, 1)
        self.progress = progress or Progress()
        self.ring = Ring(comm, self.progress)

    def allocate(self, nbytes: int) -> np.ndarray:
        """`nbytes` of memory as uint8, aligned to 64 bytes: shared, where the ranks share a node and there is room."""
        return allocate_shared(self.ring, nbytes)

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        if self.size > 1:
            self.ring.agree("barrier")

    def broadcast(self, array, root: int = 0) -> None:
        """`array` of rank `root` replaces everybody's; same length and dtype everywhere."""
        buffer = as_host_buffer(array, "a broadcast")
        if self.size == 1:
            return
        self.ring.agree("broadcast", buffer.dtype, len(buffer), f"from {root}")
        data = buffer.message(0, len(buffer))
        for start in range(0, data.size, PIECE_BYTES):
            self.ring.wait(self.comm.Ibcast(data[start : start + PIECE_BYTES], root))

    def broadcast_json(self, value, root: int = 0):
        """The value of rank `root`, on every rank."""
        if self.size == 1:
            return json.loads(json.dumps(value))
        data = np.frombuffer(json.dumps(value).encode(), np.uint8) if self.rank == root else np.empty(0, np.uint8)
        length = np.array([data.size], np.int64)
        self.broadcast(length, root)
        data = data.copy() if self.rank == root else np.empty(int(length[0]), np.uint8)
        self.broadcast(data, root)
        return json.loads(data.tobytes())

    def gather_json(self, value) -> list | None:
        """Everybody's values in rank order on rank 0, None elsewhere."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        self.ring.agree("gather")
        lengths = np.zeros(self.size, np.int64)
        self.ring.wait(self.comm.Igather(np.array([data.size], np.int64), lengths))
        everything = np.empty(int(lengths.sum()), np.uint8)
        self.ring.wait(self.comm.Igatherv(data, [everything, lengths]))
        if self.rank != 0:
            return None
        pieces = np.split(everything, np.cumsum(lengths)[:-1])
        return [json.loads(piece.tobytes()) for piece in pieces]

    def all_gather_json(self, value) -> list:
        """Everybody's values in rank order, on every rank."""
        return self.broadcast_json(self.gather_json(value))

    def close(self) -> None:
        """Gives the communicator back, politely after the last rank has come.

        Where ranks disagreed each closes alone, and the communicator is left as it is: MPI may reuse a freed one, and a
        message that nobody took would be taken for a new one.
        """
        if self.comm is None:
            return
        self.ring.close()
        if not self.ring.broken:
            self.comm.Free()
        self.comm = None
