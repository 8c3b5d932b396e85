"""Beside torch's own DistributedDataParallel, over gloo in the same launch: the same data gives the same weights."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from hpctrain import DataParallel, Mesh
from tests.train.loops import assert_close, loss_of, net, share

STEPS = 10


@pytest.fixture
def mesh(comm, shared_tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with Mesh(comm) as mesh:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{shared_tmp_path}/store",
            rank=mesh.rank,
            world_size=mesh.size,
            timeout=timedelta(seconds=50),
        )
        yield mesh
        mesh.barrier()
        distributed.destroy_process_group()


def train(model, mesh, *, every: int, clip: float | None):
    """Plain loops differ in nothing but the wrapper; each update takes `every` batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for piece in range(every):
            with model.no_sync() if piece < every - 1 else nullcontext():
                (loss_of(model, share(step * every + piece, mesh)) / every).backward()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("every, clip", [(1, None), (1, 0.1), (3, None), (2, 0.1)])
def test_the_weights_are_those_of_torch(mesh, every, clip):
    ours = DataParallel(net(mesh.rank), mesh, bucket_bytes=300)
    theirs = DistributedDataParallel(net(mesh.rank), find_unused_parameters=True)
    mine = train(ours, mesh, every=every, clip=clip)
    other = train(theirs, mesh, every=every, clip=clip)
    assert_close(ours.module, theirs.module, 1e-6)
    for found, expected in zip(ours.parameters(), theirs.parameters()):
        assert (found in mine.state) == (expected in other.state), "torch skips the same parameters"
        assert found not in mine.state or mine.state[found]["step"] == other.state[expected]["step"]


@pytest.mark.mpi(min_size=2)
def test_without_unused_parameters_too(mesh):
    def build():
        return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.GELU(), torch.nn.Linear(9, 5))

    ours = DataParallel(net(mesh.rank, build=build), mesh)
    theirs = DistributedDataParallel(net(mesh.rank, build=build))
    train(ours, mesh, every=1, clip=None)
    train(theirs, mesh, every=1, clip=None)
    assert_close(ours.module, theirs.module, 1e-6)
