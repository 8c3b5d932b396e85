"""Workers train, servers hold parameters: the last ranks of a launch are its servers, and rank 0 always trains."""

import atexit

from hpctrain.comm import abort
from hpctrain.comm.abort import RankFailed
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import LAUNCH, duplicate, split
from hpctrain.comm.progress import Progress
from hpctrain.comm.start import join_launch


class Roles:
    """Cuts the ranks of a launch, or of `comm`, into workers and servers. Collective; close it, or use `with`.

    `peers`: a communicator of those with this rank's role, for a mesh of workers; `everybody`: a group of all ranks,
    on which workers and servers write to each other and meet at the beginning and at the end; `client`: through what
    this worker does so, once it does. `progress`: as of a Mesh. ValueError where no rank would be left to train.

    `Roles()` takes all ranks of the launch, starts MPI and sees to the end of the program, as `Mesh()` does.
    """

    def __init__(self, comm=LAUNCH, servers: int = 1, progress: Progress | None = None):
        launched = isinstance(comm, str) and comm == LAUNCH
        if launched:
            comm = join_launch()
        size = comm.size if comm is not None else 1
        if not 0 < servers < size:
            have = f"{size} ranks leave" if size != 1 else "1 rank leaves"
            raise ValueError(f"servers={servers}: {have} none to train; start more, as mpirun -n {servers + 1}")
        self.num_servers, self.num_workers = servers, size - servers
        self.progress = progress or Progress()
        self.everybody = Group(duplicate(comm, self.progress), self.progress)
        self.rank, self.client = self.everybody.rank, None
        self.is_server = self.rank >= self.num_workers
        self.server = self.rank - self.num_workers if self.is_server else None
        self._same = Group(split(self.everybody, int(self.is_server), self.rank), self.progress)
        self.peers, self.group = self._same.comm, self._same
        self._closed = False
        self._at_exit = abort.at_exit(self.close) if launched else None

    def rank_of_server(self, server: int) -> int:
        return self.num_workers + server

    def close(self) -> None:
        """Gives the communicators back. Collective."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if self._closed:
            return
        if self.client is not None and not self.client.closed:
            raise RankFailed(f"worker {self.rank} (rank {self.rank}) ends without done(), for which the servers wait")
        self._closed = True
        self._same.close()
        self.everybody.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()
