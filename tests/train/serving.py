"""Servers and workers on the ranks of one communicator, for tests: what the workers do is a function."""

import io
import json

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.roles import Roles
from hpctrain.config import Config
from hpctrain.model.random_state import CPU
from hpctrain.plan.grid import Grid
from hpctrain.plan.sharding import Segment
from hpctrain.train.build import build_evaluation, build_executor
from hpctrain.train.client import ServiceClient
from hpctrain.train.layout import settled
from hpctrain.train.server import ParameterServer
from hpctrain.train.service import ServiceSettings, TableShape, describe
from hpctrain.train.trainer import Trainer
from tests.train.toys import all_weights

PARAMETERS = {"a": 5, "b": 40, "c": 1, "d": 100}
SETTINGS = ServiceSettings()
TABLES = [TableShape("users", 50, 4, 0.1), TableShape("items", 7, 3, 0.1)]


def arena(dtype=torch.float64) -> tuple[list[Segment], int]:
    """Segments of PARAMETERS in an arena whose parameters begin on cache lines."""
    segments, place = [], 0
    for name, size in PARAMETERS.items():
        segments.append(Segment(name, place, place + size))
        place += -(-size // 8) * 8
    return segments, place


def on_ranks(comm, num_workers: int, num_servers: int):
    """The communicator of the first ranks that are needed; None on the others. Collective over `comm`."""
    part = comm.Split(int(comm.rank >= num_workers + num_servers), comm.rank)
    if comm.rank < num_workers + num_servers:
        return part
    part.Free()
    return None


def serve(comm, num_servers: int, work, settings: ServiceSettings = SETTINGS, segments=None):
    """`work(client, worker)` on workers; its results by worker, figures and logs by server, on all ranks. Collective.

    The arena starts as 0, 0.01, 0.02, ...; one of other `segments` as zeros.
    """
    own, size = arena()
    first = 0.01 * torch.arange(size, dtype=torch.float64)
    if segments is not None:
        own, size = segments, segments[-1].stop
        first = torch.zeros(size, dtype=torch.float64)
    record, figures, result = io.StringIO(), None, None
    with Roles(comm, num_servers) as roles:
        if roles.is_server:
            server = ParameterServer(roles, record)
            figures = server.serve()
        else:
            client = ServiceClient(roles, describe(settings, torch.float64, own, size, TABLES, num_servers), first)
            result = work(client, roles.rank)
            client.done()
        told = roles.everybody.all_gather_json([result, figures, record.getvalue().splitlines()])
    workers, servers = told[: len(told) - num_servers], told[len(told) - num_servers :]
    logs = [[json.loads(line) for line in each[2]] for each in servers]
    return [each[0] for each in workers], [each[1] for each in servers], logs


def train(comm, task, num_workers: int, num_servers: int, device=CPU, **settings):
    """As toys.run, on so many ranks of `comm` (None on the others): losses of rounds on rank 0, weights on workers.

    Also the logs of all servers. Collective.
    """
    part = on_ranks(comm, num_workers, num_servers)
    if part is None:
        return None
    settings = {"steps": 20, "precision": "float64", "lr": 0.05, "bucket_bytes": 200, "record_log": True, **settings}
    config = settled(Config(servers=num_servers, **settings), part.size)
    lines, result, record = [], (None, None), io.StringIO()
    with Roles(part, num_servers) as roles:
        if roles.is_server:
            ParameterServer(roles, record).serve()
        else:
            mesh = Mesh(roles.peers, Grid(1, num_workers))
            executor = build_executor(config, task, mesh, roles=roles, device=device)
            evaluation = build_evaluation(config, task, mesh) if config.eval_every else None
            trainer = Trainer(config, executor, mesh, lines.append, evaluation)
            trainer.check()
            trainer.train()
            losses = [line["loss"] for line in lines if "loss" in line] if mesh.rank == 0 else None
            result = losses, all_weights(executor, mesh)
            executor.update.client.done()
            mesh.close()
        told = roles.everybody.all_gather_json(record.getvalue().splitlines())
    part.Free()
    return *result, [[json.loads(line) for line in each] for each in told[num_workers:]]


def pull_dense(client: ServiceClient, clock: int, **how) -> torch.Tensor:
    into = torch.zeros(client.description.parts[-1].stop, dtype=torch.float64)
    return client.pull(clock, into, **how).wait().values
