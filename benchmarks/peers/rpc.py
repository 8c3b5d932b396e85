"""A table of rows on one process and a worker on another, by torch.distributed.rpc as its tutorials have it.

The server's functions are plain ones on a tensor of its process: index_select, and index_add_ with the learning rate.
An answer to a push says that it has been applied. TensorPipe moves what they take and give, over loopback and shared
memory, with threads of its own in the same two processes.
"""

import os
import socket
import warnings

import torch.distributed.rpc as rpc
from torch import Tensor

SERVER, WORKER = "server", "worker"
_tables: list[Tensor] = []  # of the server


def pull(ids: Tensor) -> Tensor:
    return _tables[0].index_select(0, ids)


def push(ids: Tensor, sums: Tensor, rate: float) -> None:
    _tables[0].index_add_(0, ids, sums, alpha=-rate)


class Rpc:
    """Both sides of it: `rank` 1 serves `table`, rank 0 asks. `port` is one that rank 0 found free. Collective."""

    def __init__(self, rank: int, port: int, table: Tensor | None = None):
        if table is not None:
            _tables[:] = [table]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own group
            rpc.init_rpc(SERVER if rank else WORKER, rank=rank, world_size=2)

    def pull(self, ids: Tensor) -> Tensor:
        return rpc.rpc_sync(SERVER, pull, args=(ids,))

    def push(self, ids: Tensor, sums: Tensor, rate: float) -> None:
        rpc.rpc_sync(SERVER, push, args=(ids, sums, rate))

    def close(self) -> None:
        """Collective."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rpc.shutdown()
        _tables.clear()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
