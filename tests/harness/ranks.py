"""The ranks of one pytest launch, and how they talk to each other about their tests.

Everything goes over a private duplicate of the world, so that a message which a test forgot cannot be taken for ours.
Waiting never blocks inside MPI: with more ranks than cores a blocking call would starve the ranks that still test.
"""

from __future__ import annotations

import json
import time
from array import array

LONGEST_SLEEP = 0.002  # seconds between two looks at a request


class Ranks:
    """This process among the ranks of a launch; every method but `name` is collective."""

    def __init__(self, world):
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self._world = world
        self._comm, request = world.Idup()
        _wait(request)

    def name(self) -> str:
        """The MPI library's name and version, one short line."""
        from mpi4py import MPI

        vendor, version = MPI.get_vendor()
        return f"{vendor} {'.'.join(map(str, version))}"

    def share(self, value):
        """Rank 0's `value` (anything that JSON can hold), on every rank."""
        return json.loads(self.gather(json.dumps(value) if self.rank == 0 else "")[0])

    def gather(self, text: str) -> list[str]:
        """Every rank's `text`, on every rank, by rank."""
        body = text.encode()
        lengths = array("q", [0] * self.size)
        _wait(self._comm.Iallgather(array("q", [len(body)]), lengths))
        everything = bytearray(sum(lengths))
        if everything:
            _wait(self._comm.Iallgatherv(bytearray(body), [everything, list(lengths)]))
        ends = [sum(lengths[: i + 1]) for i in range(self.size)]
        return [everything[end - length : end].decode() for end, length in zip(ends, lengths, strict=True)]

    def abort(self, code: int) -> None:
        """End every rank of the launch with this exit code. Not collective; any thread may call it."""
        self._world.Abort(code)

    def close(self) -> None:
        """Meet once more, then free the private communicator."""
        _wait(self._comm.Ibarrier())
        self._comm.Free()


def _wait(request) -> None:
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(LONGEST_SLEEP, pause + 0.0001)
