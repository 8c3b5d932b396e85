"""Memory that the ranks of one node share: MPI windows that every rank reads and writes like its own."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.comm import abort
from hpctrain.comm.progress import wait_until

PAGE = 4096  # bytes
_numbers = itertools.count(1)
_open: list[tuple[int, Any]] = []  # windows of MPI that nobody has freed, each with the world's rank of its first rank


class Window:
    """Memory of all ranks of `comm`, zero at first: `nbytes` of this one; `parts[rank]` is as uint8. Collective.

    MPI frees it when all ranks close it. A look at its memory after that would end the process, so a rank that still
    holds an array on it says so (`is_held`), and then nobody frees it before the program's end.
    """

    def __init__(self, comm, nbytes: int):
        from mpi4py import MPI

        size = -(-max(nbytes, 1) // PAGE) * PAGE
        self._window = MPI.Win.Allocate_shared(size + (PAGE if comm.rank == 0 else 0), 1, comm=comm)
        self._opened = (MPI.Group.Translate_ranks(comm.group, [0], MPI.COMM_WORLD.group)[0], self._window)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.fence: Callable[[], None] = self._window.Sync  # what this rank wrote before it, others see before the rest
        memories = [memoryview(self._window.Shared_query(rank)[0]) for rank in range(comm.size)]
        memories[0] = memories[0][:-PAGE]
        self.parts = [np.frombuffer(memory, np.uint8) for memory in memories]
        if comm.rank == 0:
            _number(self._window)[0] = next(_numbers)
        _open.append(self._opened)
        self._memory = [weakref.ref(part.base) for part in self.parts]  # that of every view, of a tensor's too
        self.own = self.parts[comm.rank]
        self.own[:] = 0  # by its owner: the pages are near the core that uses them, and taken from here on

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where memory at `address` lies in this rank's part, None where it does not."""
        offset = address - self.own.ctypes.data
        return offset if offset >= 0 and offset + nbytes <= self.own.size else None

    def release(self) -> None:
        """This rank looks at it no more, but for arrays that were handed out."""
        del self.parts, self.own

    @property
    def is_held(self) -> bool:
        """Whether an array of this rank, or a tensor, still lies on the memory of any rank; after `release`."""
        return any(memory() is not None for memory in self._memory)

    def free(self) -> None:
        """Gives the memory back. Collective, after `release`, where no rank holds it."""
        _open.remove(self._opened)
        _free(self._window)


def num_open() -> int:
    """How many windows this rank has."""
    return len(_open)


def forget(since: int) -> None:
    """Leaves what was made since there were so many to MPI: where another rank has none of it, to free it is a hang."""
    del _open[since:]


def free_all() -> None:
    """Gives back what is still there, held or not, at the program's end. Collective over all that made windows.

    MPI may do so itself, Open MPI does; but in the order of each rank's own table, and ranks that are in several groups
    then wait for each other for ever. By the number that its first rank gave it, all come to the same window next.
    """
    for _, window in sorted(_open, key=lambda opened: (opened[0], _given_number(opened[1]))):
        _free(window)
    _open.clear()


def _given_number(window) -> int:
    number = _number(window)
    wait_until(lambda: number[0] != 0)
    return int(number[0])


def _number(window) -> np.ndarray:
    """Where its first rank numbers it, behind the memory of that rank."""
    return np.frombuffer(memoryview(window.Shared_query(0)[0])[-8:], np.int64)


def _free(window) -> None:
    window.Unlock_all()
    window.Free()


abort.before_finalize(free_all)  # registered before any mesh is there, so that it comes after their close()
