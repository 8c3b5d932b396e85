"""Running statistics: averaged by weight, the same on all ranks, and one's own again when that is wanted."""

import pytest
import torch
from torch import nn

from hpctrain.comm.mesh import Mesh
from hpctrain.train.statistics import RunningStatistics
from tests.train.loops import assert_same_everywhere


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


def layers(rank=0, dtype=torch.float32):
    shared = nn.BatchNorm1d(2)
    found = {
        "layers.0": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm2d(3), nn.BatchNorm1d(4, track_running_stats=False)),
        "layers.1": shared,
        "layers.2": nn.Sequential(shared, nn.LayerNorm(2)),
    }
    for number, layer in enumerate((found["layers.0"][1], shared)):
        layer.to(dtype)
        layer.running_mean.copy_(torch.arange(len(layer.running_mean)) + 10.0 * rank + number)
        layer.running_var.fill_(rank + 1.0)
        layer.num_batches_tracked.fill_(rank + 3)
    return found


def test_the_layers_that_count_are_found_once_by_name():
    assert RunningStatistics(layers(), Mesh(None).data).names == ["layers.0.1", "layers.1"]
    assert RunningStatistics({"": nn.BatchNorm1d(2)}, Mesh(None).data).names == [""]
    assert RunningStatistics({"": nn.Sequential(nn.BatchNorm1d(2))}, Mesh(None).data).names == ["0"]


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_the_average_is_weighted_and_the_same_everywhere(mesh, dtype):
    mine = layers(mesh.rank, dtype)
    statistics = RunningStatistics(mine, mesh.data)
    statistics.average(mesh.rank + 0.5)
    weights = torch.arange(mesh.size) + 0.5
    middle = float((weights * torch.arange(mesh.size)).sum() / weights.sum())
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    expected = torch.arange(3) + 10.0 * middle
    assert torch.allclose(mine["layers.0"][1].running_mean.float(), expected, rtol=tolerance)
    assert torch.allclose(mine["layers.1"].running_var.float(), torch.full((2,), middle + 1), rtol=tolerance)
    assert int(mine["layers.1"].num_batches_tracked) == mesh.rank + 3
    assert_same_everywhere(mesh, [mine["layers.1"].running_mean, mine["layers.0"][1].running_var])


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_items_does_not_count_and_none_at_all_changes_nothing(mesh):
    mine = layers(mesh.rank)
    if mesh.rank == 0:
        mine["layers.1"].running_mean.fill_(float("nan"))
    statistics = RunningStatistics(mine, mesh.data)
    before = mine["layers.0"][1].running_mean.clone()
    statistics.average(0)
    assert torch.equal(mine["layers.0"][1].running_mean, before)
    statistics.average(5 if mesh.rank == 1 else 0)
    for name, tensor in (("layers.1", mine["layers.1"]), ("layers.0", mine["layers.0"][1])):
        reference = layers(1)[name] if name == "layers.1" else layers(1)[name][1]
        assert torch.equal(tensor.running_mean, reference.running_mean)


@pytest.mark.mpi
def test_averaged_inside_and_ones_own_again_afterwards(mesh):
    mine = layers(mesh.rank)
    statistics = RunningStatistics(mine, mesh.data)
    with pytest.raises(ArithmeticError), statistics.averaged(1.0):
        assert float(mine["layers.1"].running_var[0]) == pytest.approx((mesh.size + 1) / 2)
        raise ArithmeticError
    assert torch.equal(mine["layers.1"].running_var, layers(mesh.rank)["layers.1"].running_var)
    statistics.remember()
    mine["layers.1"](torch.randn(5, 2))
    statistics.average(1.0)
    statistics.restore()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(mine["layers.1"], name), getattr(layers(mesh.rank)["layers.1"], name))


@pytest.mark.mpi
def test_without_such_layers_nothing_is_sent(mesh):
    before = vars(mesh.data.ring.counters).copy()
    statistics = RunningStatistics({"a": nn.Linear(2, 2)}, mesh.data)
    statistics.remember()
    statistics.average(1.0)
    with statistics.averaged(2.0):
        pass
    statistics.restore()
    assert statistics.names == [] and vars(mesh.data.ring.counters) == before
