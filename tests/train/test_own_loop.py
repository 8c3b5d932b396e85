"""ParameterClient in a loop of one's own: what was backwarded since the last push is sent, once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.comm.abort import RankFailed
from hpctrain.comm.roles import Roles
from hpctrain.train.own_loop import ParameterClient
from hpctrain.train.server import ParameterServer
from tests.train.serving import on_ranks


def run(comm, num_servers: int, work, **settings):
    """`work(client, model)` on workers; figures of the servers, on all ranks. Collective."""
    figures = None
    with Roles(comm, num_servers) as roles:
        if roles.is_server:
            figures = ParameterServer(roles).serve()
        else:
            torch.manual_seed(0)
            model = nn.Linear(40, 3).double()
            client = ParameterClient(roles, model, {"rows": (20, 3, 0.5)}, lr=0.25, optimizer="sgd", **settings)
            work(client, model)
            client.done()
        return [each for each in roles.everybody.all_gather_json(figures) if each is not None]


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("num_servers", (1, 2, 3))
def test_each_push_is_a_step_with_what_came_since_the_last(comm, num_servers):
    if comm.size <= num_servers or (part := on_ranks(comm, 1, num_servers)) is None:
        return
    inputs, ids = torch.randn(5, 40, dtype=torch.float64), torch.tensor([3, 19, 3])

    def work(client, model):
        twin = nn.Linear(40, 3).double()
        twin.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.25)

        def step(scale):
            optimizer.zero_grad()
            (scale * twin(inputs).square().sum() / 5).backward()
            optimizer.step()

        client.pull()
        model(inputs).square().sum().backward()
        client.push(items=5)
        step(1.0)
        client.pull()
        same(model.weight, twin.weight)
        rows = client.rows("rows", ids)
        rows.sum().backward()  # of rows alone
        client.push(items=1)
        client.pull()
        same(model.weight, twin.weight)
        with torch.no_grad():
            moved = rows.detach() - client.rows("rows", ids)
        same(moved, torch.tensor([0.5, 0.25, 0.5]).double()[:, None].expand(3, 3))
        model(inputs).square().sum().backward()  # twice into one push
        model(inputs).square().sum().backward()
        client.push(items=5)
        step(2.0)
        client.pull()
        same(model.weight, twin.weight)
        same(model.bias, twin.bias)

    run(part, num_servers, work)
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_is_said_in_one_line(comm):
    if (part := on_ranks(comm, 1, 1)) is None:
        return

    def work(client, model):
        with pytest.raises(TypeError, match="ids are torch.float32; integers would do"):
            client.rows("rows", torch.ones(3))
        with pytest.raises(ValueError, match="there is no such table; there is rows"):
            client.rows("row", torch.ones(3))
        assert torch.equal(client.rows("rows", torch.tensor([4, 1]).int()), client.rows("rows", [4, 1]))
        client.done()
        for call in (client.pull, lambda: client.push(items=1), lambda: client.rows("rows", [1])):
            with pytest.raises(RuntimeError, match="this client is done"):
                call()

    run(part, 1, work)
    with Roles(part, 1) as roles:
        if roles.is_server:
            ParameterServer(roles).serve()
        else:
            client = ParameterClient(roles, nn.Linear(2, 2))
            with pytest.raises(ValueError, match="have a client already"):
                ParameterClient(roles, nn.Linear(2, 2))
            with pytest.raises(RankFailed, match="rank 0. ends without done"):
                roles.close()
            client.done()
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_what_is_not_trained_is_that_of_worker_0_too(comm):
    if (part := on_ranks(comm, 2, 1)) is None:
        return
    with Roles(part, 1) as roles:
        told = None
        if roles.is_server:
            ParameterServer(roles).serve()
        else:
            torch.manual_seed(roles.rank)
            model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            model[0].bias.requires_grad_(False)
            model[1].running_mean.normal_()
            ParameterClient(roles, model).done()
            told = [model[0].bias.tolist(), model[1].running_mean.tolist()]
        everybody = roles.everybody.all_gather_json(told)
    assert everybody[0] == everybody[1]
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_a_lag_counts_from_the_oldest_that_was_read(comm):
    """Worker 0 reads weights, then worker 1 updates them twice, then worker 0 reads rows and pushes."""
    if (part := on_ranks(comm, 2, 1)) is None:
        return
    turn = part.Split(int(part.rank == 2), part.rank)  # of the workers

    def work(client, model):
        if part.rank == 0:
            client.pull()
            turn.Barrier()
            turn.Barrier()
            client.rows("rows", torch.tensor([1])).sum().backward()
            with torch.no_grad():
                client.rows("rows", torch.tensor([2]))
            client.push(items=1)
        else:
            turn.Barrier()
            for _ in range(2):
                client.pull()
                model(torch.ones(1, 40).double()).sum().backward()
                client.push(items=1)
            client.pull(fresh=False)
            turn.Barrier()

    figures = run(part, 1, work, staleness=float("inf"))
    assert figures[0]["lags"] == {"0": 2, "2": 1}
    turn.Free()
    part.Free()


def test_a_setting_that_cannot_be_is_one_line_of_the_callers_words():
    roles = SimpleNamespace(num_servers=1)
    with pytest.raises(ValueError, match="^ParameterClient: optimizer: expected one of "):
        ParameterClient(roles, optimizer="best")
    with pytest.raises(TypeError, match="^ParameterClient: no setting is called rate; there is staleness, "):
        ParameterClient(roles, rate=0.1)
