"""The communicators of a run: who talks to whom, on channels that nothing else uses.

A mesh is built from any communicator, also a part of one, and duplicates it: a library's messages and ours never meet.
"""

import atexit
import os
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

from hpctrain.comm import abort
from hpctrain.comm.environment import is_mitigating
from hpctrain.comm.group import Group
from hpctrain.comm.meeting import Meeting
from hpctrain.comm.nodes import join_node
from hpctrain.comm.progress import Progress, wait_until
from hpctrain.comm.start import join_launch, tell_of_absence
from hpctrain.comm.tuning import note_other_place, shared_tuning
from hpctrain.plan.grid import Grid, grid_of
from hpctrain.plan.tuning import Tuning

LAUNCH = "launch"  # stands for all ranks of the launch


class Mesh:
    """`world`: all ranks; `data`: the replicas of this rank's stage, in order; `pipe`: the stages of its replica.

    Collective; close it, or use `with`.

    `Mesh()` takes all ranks of the launch and starts MPI where a launcher announced it; a program without a launcher is
    one rank, and needs no MPI. It also sees to the end of a program: an exception that nobody catches on one rank
    prints its traceback and ends all ranks, and a rank whose program ends while others still call something ends them
    with CollectiveMismatch. So make it early; `abort_on_error` covers what comes before, and sys.exit of one rank too.

    `Mesh(comm)` takes any communicator of mpi4py, `Mesh(None)` this process alone; both leave the program's end alone:
    an exception on one rank is yours to tell the others.

    `stages` cuts a model into so many groups of layers, the ranks that are left over are replicas; `grid` says the same
    and which ranks are consecutive. `progress` of somebody whose messages are to move on together with these. `tuning`:
    a file that `tune` wrote on ranks like these, which rank 0 reads; give it on all ranks, or on none.
    `shares_memory`: ranks of a node sum in memory that they share, where that is faster. Raises ValueError where MPI
    cannot be started, the ranks do not divide, or the file cannot be used.
    """

    def __init__(
        self,
        comm=LAUNCH,
        grid: Grid | None = None,
        stages: int = 1,
        progress: Progress | None = None,
        tuning: Tuning | str | os.PathLike | None = None,
        shares_memory: bool = True,
    ):
        launched = isinstance(comm, str) and comm == LAUNCH
        comm = join_launch() if launched else comm
        size = comm.size if comm is not None else 1
        if grid is None:
            try:
                grid = grid_of(size, stages)
            except ValueError as error:
                raise ValueError(f"stages={stages}: {error}") from None
        elif stages not in (1, grid.num_stages):
            raise ValueError(f"stages={stages}: the grid has {grid.num_stages}; give one of them")
        if grid.num_ranks != size:
            raise ValueError(f"a layout of {grid.num_ranks} ranks does not fit {size} ranks")
        self.grid, self.progress = grid, progress or Progress()
        self.world = Group(duplicate(comm, self.progress), self.progress)
        self.rank = self.world.rank
        try:
            self.tuning = shared_tuning(self.world, tuning)
        except ValueError:
            self.world.close()
            raise
        self.stage, self.replica = self.grid.coordinate(self.rank)
        self.data = Group(self._part(self.stage, self.replica), self.progress)
        self._shares_memory = shares_memory
        self._join_node(self.data, num_rings=self.grid.num_stages)
        self.data.ring.constants = self.tuning.constants
        if self.stage == 0:
            note_other_place(self.tuning, self.data.ring)
        piped = self.grid.num_stages > 1
        self.pipe = Group(self._part(self.replica, self.stage) if piped else None, self.progress)
        self.meeting = Meeting(self.data.ring)
        self.groups: list[Group] = []  # further ones of the replicas
        self.parts: list[Group] = []  # of the pipe
        self.on_close: list[Callable[[], None]] = []  # called first
        self.joined = False  # whether a model is inside a join
        self._closed = False
        self._at_exit = abort.at_exit(self.close) if launched and comm is not None else None

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.world.size

    @property
    def everybody(self) -> Group:
        """The group in which all ranks agree: a second one would be of no use where there is one stage."""
        return self.data if self.grid.num_stages == 1 else self.world

    def barrier(self) -> None:
        """Returns when all ranks have come. Collective."""
        self.everybody.barrier()

    def add_group(self) -> Group:
        """A further group of the replicas, on a ring of its own; closed with the mesh. Collective."""
        self.groups.append(Group(duplicate(self.data.comm, self.progress), self.progress))
        self._join_node(self.groups[-1], stage_bytes=0)
        self.groups[-1].ring.constants = self.tuning.constants
        return self.groups[-1]

    def add_world(self) -> Group:
        """A further group of all ranks; closed with the mesh. Collective."""
        self.parts.append(Group(duplicate(self.world.comm, self.progress), self.progress))
        return self.parts[-1]

    def add_pipe(self) -> Group:
        """A further group of the stages of this replica; closed with the mesh. Collective."""
        self.parts.append(Group(duplicate(self.pipe.comm, self.progress), self.progress))
        return self.parts[-1]

    def drop(self, group: Group) -> None:
        """Closes a group of the pipe that is of no more use. Collective over its ranks."""
        self.parts.remove(group)
        group.close()

    def part_of_pipe(self, takes_part: bool) -> Group | None:
        """Those stages of this replica that take part, closed with the mesh; None on others. Collective."""
        comm = split(self.world, self.replica if takes_part else self.grid.num_replicas, self.stage)
        group = Group(comm, self.progress)
        if not takes_part:
            group.close()
            return None
        self.parts.append(group)
        return group

    def _join_node(self, group: Group, **how) -> None:
        if self._shares_memory:
            join_node(group.ring, **how)

    def _part(self, color: int, key: int):
        if self.world.comm is None:
            return None
        if self.grid.num_stages == 1:
            return duplicate(self.world.comm, self.progress)
        return split(self.world, color, key)

    def close(self) -> None:
        """Frees the communicators. Collective; where the replicas disagreed each rank closes alone."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if self._closed:
            return
        if any(group.ring.broken for group in (*self.groups, *self.parts, self.data, self.world)):
            self._closed = True
            self._abandon()  # some were told in this very call, and do not come to what follows
            return
        for end in list(self.on_close):
            end()
        if self.groups and self.data.size > 1:
            self.data.ring.agree("close")  # whoever still calls something sees it here, on whatever ring it does so
        for group in (*self.groups, *self.parts, self.data, self.pipe, self.world):
            group.close()
        self._closed = True

    def _abandon(self) -> None:
        """Takes back what is posted; the communicators stay, for messages that nobody takes may be on their way."""
        for group in (*self.groups, *self.parts, self.data, self.pipe, self.world):
            if group.ring.broken:
                group.close()
            elif group.size > 1:
                group.ring.abandon()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()


def duplicate(comm, progress: Progress | None = None):
    """A private copy of `comm`; None of None. Collective, waited for politely, while `progress` moves on."""
    if comm is None:
        return None
    copy, request = comm.Idup()
    with leaving(comm):
        late = partial(tell_of_absence, comm.rank, comm.size)
        wait_until(lambda: request.Test() or (progress is not None and progress.poll()), late)
    return copy


def split(group: Group, color: int, key: int):
    """A communicator of the ranks of `group` that give the same color, in order of their keys. Collective."""
    with leaving(group.comm):
        group.barrier()  # waits politely, which Split does not
        return group.comm.Split(color, key)


@contextmanager
def leaving(comm):
    """Who leaves what is done together on `comm`, for another rank is lost, has all others leave it too."""
    try:
        yield
    except RuntimeError:
        if is_mitigating(os.environ):
            comm.Revoke()
        raise
