"""Loops of one's own, with a model on a device (tests/comm/pretend.py), give the bits of the same loop on the host."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hpctrain import DataParallel, Mesh, ParameterClient, ParameterServer, Pipeline, Roles
from hpctrain.model.random_state import CPU
from tests.comm.pretend import DEVICE, pretending
from tests.train.loops import loss_of, net, share
from tests.train.test_borders import on_part
from tests.train.test_equivalence import part_of
from tests.train.test_pipeline_api import adam, batch, layers


def on_both(loop):
    """`loop(device)` gives weights by name, on the host and on the device; None where there are none."""
    found = []
    for device in (CPU, DEVICE):
        with pretending() if device == DEVICE else nullcontext():
            weights = loop(device)
            found.append(weights and {name: each.detach().cpu() for name, each in weights.items()})
    for name, weight in (found[0] or {}).items():
        assert torch.equal(weight, found[1][name]), name


@pytest.mark.mpi
@pytest.mark.parametrize("how", [{}, {"bucket_bytes": 100}, {"compress": "bf16"}, {"algorithm": "windows"}])
def test_replicas_wrap_a_model_on_a_device(comm, how):
    part = part_of(comm, 3)
    if part is None:
        return

    def loop(device):
        with Mesh(part) as mesh:
            module = net(mesh.rank).to(device)
            module.tied.weight = module.first.weight  # which becomes two here; on CUDA it stays one
            model = DataParallel(module, mesh, **{"algorithm": "ring", **how})
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(6):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                loss_of(model, share(step, mesh).to(device)).backward()
                optimizer.step()
            return dict(model.module.named_parameters())

    on_both(loop)
    part.Free()


@pytest.mark.mpi
def test_a_pipeline_takes_its_layers_to_a_device(comm):
    """Rows come from the host; where they are on the device already nothing is left to do."""
    part = on_part(comm, 1, 2)
    if part is None:
        return

    def loop(device):
        with Mesh(part, stages=1) as mesh:
            pipeline = Pipeline(layers(), nn.functional.mse_loss, mesh, adam, device=device, num_microbatches=3)
            for step in range(4):
                own = [rows[mesh.replica :: 2] for rows in batch(step)]
                pipeline.step(*(own if step % 2 else [rows.to(device) for rows in own]))
            pipeline.evaluate(*batch(9))
            return pipeline.state_dict()

    on_both(loop)
    part.Free()


@pytest.mark.mpi
def test_a_client_has_its_model_on_a_device_and_its_tables_on_servers(comm):
    part = part_of(comm, 3)
    if part is None:
        return

    def loop(device):
        with Roles(part, servers=1) as roles:
            if roles.is_server:
                ParameterServer(roles).serve()
                return None
            torch.manual_seed(1)
            model = nn.Linear(3, 1).double()
            model.to(device)
            client = ParameterClient(roles, model, {"table": (10, 3, 0.1)}, lr=0.1)
            for step in range(4):
                client.pull()
                ids = torch.tensor([step, roles.rank, step]).to(device)
                loss = model(client.rows("table", ids)).square().sum()
                loss.backward()
                client.push(items=3, loss=float(loss.detach()))
            client.pull(fresh=True)
            client.done()
            return dict(model.named_parameters())

    on_both(loop)
    part.Free()
