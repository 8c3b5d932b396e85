"""A communicator that counts for itself and holds the rules of MPI's buffers, whatever the code under test says.

Rules (MPI-4.1, 3.7.2): memory under a pending send is not changed, memory under a pending receive is not touched, and
neither is given away before its request was seen complete. With `laziness` a request is told complete only after some
more looks, as on a slower network, so that a rule which is broken by chance shows every time.
"""

import random
from collections import Counter

import numpy as np
from mpi4py import MPI


class WatchedComm(MPI.Intracomm):
    """Used instead of `comm`. `bytes` and `messages` sent, by tag; `problems`: rules that were broken."""

    def __new__(cls, comm, *_):
        return super().__new__(cls, comm)

    def __init__(self, comm, laziness: int = 0, seed: int = 0):
        self.bytes, self.messages = Counter(), Counter()
        self.problems: list[str] = []
        self.pending: list[WatchedRequest] = []
        self._laziness, self._random = laziness, random.Random(seed * 1000 + comm.rank)

    def Isend(self, buf, dest, tag=0):  # noqa: N802 - mpi4py's name
        data = np.asarray(buf)
        self.bytes[tag] += data.nbytes
        self.messages[tag] += 1
        return self._watch("send", data, super().Isend(buf, dest, tag))

    def Irecv(self, buf, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG):  # noqa: N802 - mpi4py's name
        return self._watch("receive", np.asarray(buf), super().Irecv(buf, source, tag))

    def _watch(self, what: str, data: np.ndarray, request) -> "WatchedRequest":
        watched = WatchedRequest(self, what, data, request, self._random.randint(0, self._laziness))
        for other in self.pending:
            if "receive" in (what, other.what) and watched.overlaps(other):
                self.problems.append(f"a {what} of {data.nbytes} bytes overlaps a pending {other.what}")
        self.pending.append(watched)
        return watched


class WatchedRequest:
    """Test and Cancel, as of a request."""

    def __init__(self, comm: WatchedComm, what: str, data: np.ndarray, request, looks: int):
        self.what = what
        self._comm, self._data, self._request, self._looks = comm, data, request, looks
        self._begin = data.__array_interface__["data"][0]
        self._sent = data.tobytes() if what == "send" else None

    def overlaps(self, other: "WatchedRequest") -> bool:
        return self._begin < other._begin + other._data.nbytes and other._begin < self._begin + self._data.nbytes

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        complete = self._request.Test()
        if not complete or self._looks > 0:
            self._looks -= complete
            return False
        if self in self._comm.pending:
            self._comm.pending.remove(self)
            if self._sent is not None and self._sent != self._data.tobytes():
                self._comm.problems.append(f"{self._data.nbytes} bytes changed while they were being sent")
        return True

    def Cancel(self) -> None:  # noqa: N802 - mpi4py's name
        self._looks = 0
        self._request.Cancel()
