"""Workers train, servers hold parameters: the last ranks of a launch are its servers, and rank 0 always trains."""

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import duplicate, split
from hpctrain.comm.progress import Progress


class Roles:
    """Cuts the ranks of `comm` into workers and `num_servers` servers. Collective; close it, or use `with`.

    `peers`: a communicator of those with this rank's role, for a mesh of workers; `everybody`: a group of all ranks,
    on which workers and servers write to each other and meet at the beginning and at the end; `client`: through what
    this worker does so, once it does. ValueError where no rank would be left to train.
    """

    def __init__(self, comm, num_servers: int):
        size = comm.size if comm is not None else 1
        if not 0 < num_servers < size:
            raise ValueError(f"{num_servers} servers on {size} ranks leave none to train; start more, as mpirun -n 8")
        self.num_servers, self.num_workers = num_servers, size - num_servers
        self.progress = Progress()
        self.everybody = Group(duplicate(comm), self.progress)
        self.rank, self.client = self.everybody.rank, None
        self.is_server = self.rank >= self.num_workers
        self.server = self.rank - self.num_workers if self.is_server else None
        self._same = Group(split(self.everybody, int(self.is_server), self.rank), self.progress)
        self.peers = self._same.comm

    def rank_of_server(self, server: int) -> int:
        return self.num_workers + server

    def close(self) -> None:
        """Gives the communicators back. Collective."""
        self._same.close()
        self.everybody.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.close()
