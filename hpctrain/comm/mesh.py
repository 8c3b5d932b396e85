"""The communicators of a run: who talks to whom, on channels that nothing else uses.

A mesh is built from any communicator, also a part of one, and duplicates it: a library's messages and ours never meet.
"""

from hpctrain.comm.group import Group
from hpctrain.comm.progress import Progress, wait_until
from hpctrain.plan.grid import Grid


class Mesh:
    """`world`: all ranks; `data`: the replicas of this rank's stage, in order. Collective; close it, or use `with`."""

    def __init__(self, comm=None, grid: Grid | None = None):
        size = comm.size if comm is not None else 1
        self.grid = grid or Grid(1, size)
        if self.grid.num_ranks != size:
            raise ValueError(f"a layout of {self.grid.num_ranks} ranks does not fit {size} ranks")
        self.progress = Progress()
        self.world = Group(duplicate(comm), self.progress)
        self.rank = self.world.rank
        self.stage, self.replica = self.grid.coordinate(self.rank)
        self.data = Group(self._part(self.stage, self.replica), self.progress)

    def _part(self, color: int, key: int):
        if self.world.comm is None:
            return None
        if self.grid.num_stages == 1:
            return duplicate(self.world.comm)
        self.world.barrier()
        return self.world.comm.Split(color, key)

    def close(self) -> None:
        """Frees the communicators. Collective."""
        self.data.close()
        self.world.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()


def duplicate(comm):
    """A private copy of `comm`; None of None. Collective, waited for politely."""
    if comm is None:
        return None
    copy, request = comm.Idup()
    wait_until(request.Test)
    return copy
