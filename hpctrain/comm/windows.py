"""Memory that the ranks of one node share: MPI windows that every rank reads and writes like its own."""

import weakref
from collections.abc import Callable

import numpy as np

PAGE = 4096  # bytes


class Window:
    """Memory of all ranks of `comm`, zero at first: `nbytes` of this one; `parts[rank]` is as uint8. Collective.

    MPI frees it when all ranks close it. A look at its memory after that would end the process, so a rank that still
    holds an array on it says so (`is_held`), and then nobody frees it: MPI takes it back at the program's end.
    """

    def __init__(self, comm, nbytes: int):
        from mpi4py import MPI

        size = -(-max(nbytes, 1) // PAGE) * PAGE
        self._window = MPI.Win.Allocate_shared(size, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.fence: Callable[[], None] = self._window.Sync  # what this rank wrote before it, others see before the rest
        memories = [memoryview(self._window.Shared_query(rank)[0]) for rank in range(comm.size)]
        self.parts = [np.frombuffer(memory, np.uint8) for memory in memories]
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
        self._window.Unlock_all()
        self._window.Free()
