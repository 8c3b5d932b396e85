"""Bytes that a rank sends and receives in a round: through servers, and along a ring. By formula, and counted."""

from typing import NamedTuple

import torch

from hpctrain.comm.ring import Ring
from hpctrain.comm.roles import Roles
from hpctrain.plan.sharding import Segment
from hpctrain.train.client import ServiceClient
from hpctrain.train.server import ParameterServer
from hpctrain.train.service import ServiceSettings, describe

HEADER = f"{'':<32}{'formula':>16}{'counted':>16}"


class Traffic(NamedTuple):
    """Bytes of a round of P workers and K servers, with S bytes of parameters, and of an all-reduce of n ranks."""

    worker: float
    server: float
    ring: float


def formula(num_workers: int, num_servers: int, num_ranks: int, nbytes: int) -> Traffic:
    """A worker pushes S and pulls S; each server takes in P * S / K, and gives out as much."""
    return Traffic(nbytes, num_workers * nbytes / num_servers, 2 * (num_ranks - 1) / num_ranks * nbytes)


def counted(comm, num_servers: int, num_elements: int) -> Traffic:
    """What the ranks of `comm` sent in one round, and in one all-reduce: the most of any. Collective.

    What workers send is what servers receive, and the other way round.
    """
    values = torch.ones(num_elements)
    with Roles(comm, num_servers) as roles:
        sent = {"worker": 0, "server": 0, "ring": 0}
        if roles.is_server:
            server = ParameterServer(roles)
            server.serve()
            sent["server"] = server.outbox.bytes_sent
        else:
            sent["worker"] = _one_round(roles, values)
        ring = Ring(roles.everybody.comm.Dup(), roles.progress)
        ring.all_reduce(values).start().wait()
        sent["ring"] = ring.counters.bytes_sent
        ring.close()
        ring.comm.Free()
        told = roles.everybody.all_gather_json(sent)
    return Traffic(*(max(each[what] for each in told) for what in Traffic._fields))


def _one_round(roles: Roles, values: torch.Tensor) -> int:
    """A worker's pull and push; the bytes that it sent for them."""
    size = len(values)
    segments = [Segment("weights", 0, size)]
    described = describe(ServiceSettings(), values.dtype, segments, size, [], roles.num_servers)
    client = ServiceClient(roles, described, values)
    before = client.outbox.bytes_sent
    client.pull(0, torch.empty(size)).wait()
    client.push(0, 1.0, 0.0, 0.1, values, [True] * len(segments) * roles.num_servers)
    client.wait_sent()
    sent = client.outbox.bytes_sent - before
    client.done()
    return sent


def lines(by_formula: Traffic, by_count: Traffic) -> list[str]:
    """A table, header first."""
    names = {"worker": "worker, sent and received", "server": "server, sent and received", "ring": "ring, sent"}
    pairs = zip(names.values(), by_formula, by_count)
    return [HEADER, *(f"{name:<32}{wanted:>16,.0f}{found:>16,.0f}" for name, wanted, found in pairs)]
