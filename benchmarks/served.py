"""Dense parameters and rows of a table, moved by a parameter service and by plain messages, in seconds."""

import time
from collections.abc import Callable

import numpy as np
import torch
from peers.rpc import Rpc, free_port

from hpctrain.comm.buffer import allocate
from hpctrain.comm.progress import wait_until
from hpctrain.comm.roles import Roles
from hpctrain.plan.sharding import Segment
from hpctrain.train.client import ServiceClient
from hpctrain.train.server import ParameterServer
from hpctrain.train.service import ServiceSettings, TableShape, as_bytes, describe

ITEMS, RATE = 32, 0.01
PLAIN = 1  # tag of plain messages, on the communicator of the launch
TINY = TableShape("tiny", 64, 1)  # a pull of one of its rows shows that a push is applied


def seconds_of(call: Callable[[], None], repeats: int) -> float:
    """Of one call in a row of them."""
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def connect(roles: Roles, num_elements: int, tables: list[TableShape]) -> ParameterServer | ServiceClient:
    """A server or a client with the arena and the tables. Collective."""
    if roles.is_server:
        return ParameterServer(roles)
    segments = [Segment("weights", 0, num_elements)] if num_elements else []
    settings = ServiceSettings(optimizer="sgd", lr=RATE)
    described = describe(settings, torch.float32, segments, num_elements, [*tables, TINY], roles.num_servers)
    return ServiceClient(roles, described, torch.zeros(num_elements))


class Worker:
    """The only one of a service: pushes are over when a pull has seen them."""

    def __init__(self, client: ServiceClient):
        self.client, self.clock = client, 0
        self._tiny = len(client.description.tables) - 1
        self._ids = torch.arange(len(client.description.parts))  # a row of each server

    def push(self, dense: torch.Tensor | None = None, rows: dict | None = None) -> None:
        touched = [True for part in self.client.description.parts for _ in part.segments]
        self.client.push(self.clock, ITEMS, 0.0, RATE, dense, touched, rows)
        self.clock += 1
        self.client.pull_rows(self._tiny, self._ids, self.clock).wait()


# ---- dense


def dense_pair(comm, num_servers: int, num_elements: int, repeats: int, plain_first: bool) -> dict[str, float]:
    """Seconds of plain messages each way, of torch's sgd, of a pull and of a push; on rank 0. Collective."""
    with Roles(comm, num_servers) as roles:
        side = connect(roles, num_elements, [])
        into = torch.from_numpy(allocate(0 if roles.is_server else 4 * num_elements)).view(torch.float32).zero_()
        found = {}
        for plain in (plain_first, not plain_first):
            if plain:
                found |= _plain_seconds(comm, roles, side, into, repeats)
            elif roles.is_server:
                side.serve()
            else:
                found |= _served_seconds(side, into, repeats)
        sgd = _sgd_seconds(len(side.shard.dense.values), repeats) if roles.is_server else 0.0
        found["sgd"] = max(roles.everybody.all_gather_json(sgd))
    return found


def _plain_seconds(comm, roles: Roles, side, into: torch.Tensor, repeats: int) -> dict[str, float]:
    """Of the same memory, sent by Isend and received by Irecv."""
    found = {}
    if roles.is_server:
        down = [(0, as_bytes(side.shard.dense.values))]
        up = [(0, allocate(side.shard.dense.values.nbytes))]
    else:
        parts = enumerate(side.description.parts)
        down = up = [(roles.rank_of_server(n), as_bytes(into[part.start : part.stop])) for n, part in parts]
    for name, begin in (
        ("down", comm.Isend if roles.is_server else comm.Irecv),
        ("up", comm.Irecv if roles.is_server else comm.Isend),
    ):

        def move(begin=begin, memory=down if name == "down" else up):
            requests = [begin(data, rank, PLAIN) for rank, data in memory]
            wait_until(lambda: all(request.Test() for request in requests))

        move()
        roles.everybody.barrier()
        found[name] = seconds_of(move, repeats)
    return found


def _served_seconds(client: ServiceClient, into: torch.Tensor, repeats: int) -> dict[str, float]:
    worker = Worker(client)

    def pull() -> None:
        client.pull(worker.clock, into).wait()

    def push() -> None:
        worker.push(into)

    found = {}
    for name, call in (("pull", pull), ("push", push)):
        seconds_of(call, 2)  # whose memory is new
        found[name] = seconds_of(call, repeats)
    client.done()
    return found


def _sgd_seconds(num_elements: int, repeats: int) -> float:
    """A step of torch's own optimizer with as many elements."""
    weights = torch.nn.Parameter(torch.zeros(num_elements))
    weights.grad = torch.zeros(num_elements)
    optimizer = torch.optim.SGD([weights], lr=RATE)
    optimizer.step()
    return seconds_of(optimizer.step, repeats)


# ---- rows


def sparse_pairs(comm, table: TableShape, num_ids: int, repeats: int, num_pairs: int) -> list[dict[str, float]]:
    """Seconds of pulls and pushes of distinct rows, by hpctrain and by rpc in turns; on rank 0. Collective."""
    with Roles(comm, 1) as roles:
        port = roles.everybody.broadcast_json(free_port() if roles.rank == 0 else None)
        rows = torch.full((table.num_rows, table.width), 0.01) if roles.is_server else None
        rpc = Rpc(roles.rank, port, rows)  # after `pin`, so that its threads have the same core
        side, pairs = connect(roles, 0, [table]), []
        if roles.is_server:
            side.serve()
        else:
            worker = Worker(side)
            for start in range(0, table.num_rows, num_ids):
                side.pull_rows(0, torch.arange(start, min(start + num_ids, table.num_rows)), 0).wait()
            chosen = _chosen_ids(table.num_rows, num_ids, repeats)
            sums = torch.full((num_ids, table.width), 1e-3)
            calls = _calls(worker, rpc, sums)
            for number in range(num_pairs + 1):
                names = list(calls) if number % 2 else list(reversed(calls))
                pairs.append({name: _over(calls[name], chosen) for name in names})
            side.done()
        rpc.close()
    return pairs[1:]


def _calls(worker: Worker, rpc: Rpc, sums: torch.Tensor) -> dict[str, Callable[[torch.Tensor], None]]:
    def pull(ids: torch.Tensor) -> None:
        worker.client.pull_rows(0, ids, worker.clock).wait()

    def push(ids: torch.Tensor) -> None:
        worker.push(rows={0: (ids, sums)})

    def rpc_push(ids: torch.Tensor) -> None:
        rpc.push(ids, sums, RATE / ITEMS)

    return {"pull": pull, "rpc_pull": rpc.pull, "push": push, "rpc_push": rpc_push}


def _chosen_ids(num_rows: int, num_ids: int, repeats: int) -> list[torch.Tensor]:
    generator = np.random.default_rng(0)
    return [torch.from_numpy(generator.permutation(num_rows)[:num_ids].copy()) for _ in range(repeats)]


def _over(call: Callable[[torch.Tensor], None], chosen: list[torch.Tensor]) -> float:
    ids = iter(chosen)
    return seconds_of(lambda: call(next(ids)), len(chosen))
