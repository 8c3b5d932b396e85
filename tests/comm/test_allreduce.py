"""Sum and mean as users call them."""

import numpy as np
import pytest
import torch

from hpctrain import AllReduce, Mesh
from hpctrain.comm.signature import CollectiveMismatch


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", ">f8", torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1,)])
def test_the_mean_is_the_sum_divided(mesh, dtype, shape):
    make = np.full if isinstance(dtype, str) else torch.full
    total, mean = make(shape, mesh.rank + 1.0, dtype=dtype), make(shape, mesh.rank + 1.0, dtype=dtype)
    assert AllReduce(mesh)(total, "total") is total
    assert AllReduce(mesh, "mean")(mean, name="mean") is mean
    wanted = mesh.size * (mesh.size + 1) / 2
    assert (total == make(shape, wanted, dtype=dtype)).all()
    assert (mean == make(shape, wanted, dtype=dtype) / mesh.size).all()
    assert mean.shape == shape


@pytest.mark.mpi
def test_the_mean_is_the_same_bits_everywhere(mesh, shared_seed):
    array = np.random.default_rng(shared_seed + mesh.rank).standard_normal(1001)
    AllReduce(mesh, "mean")(array)
    first = array.copy()
    mesh.data.broadcast(first)
    assert first.tobytes() == array.tobytes()


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ("sum", "mean"))
def test_it_moves_on_when_it_is_polled_and_may_be_started_again(mesh, reduction):
    array = np.full(7, float(mesh.rank))
    moving = AllReduce(mesh, reduction).start(array, "moving")
    while not moving.poll():
        pass
    moving.wait()
    assert moving.done and moving.name == "moving"
    wanted = sum(range(mesh.size)) / (mesh.size if reduction == "mean" else 1)
    assert array.tolist() == [wanted] * 7
    moving.start().wait()
    assert array.tolist() == pytest.approx([wanted * (mesh.size if reduction == "sum" else 1)] * 7)


@pytest.mark.mpi
@pytest.mark.parametrize("make", (lambda x: np.full(5, x, np.float16), lambda x: torch.full((5,), x).half()))
def test_a_mean_of_16_bits_is_finite_though_its_sum_is_not(mesh, make):
    mean = make(40000.0)
    moving = AllReduce(mesh, "mean").start(mean)
    moving.wait()
    assert (mean == 40000).all()
    mean[...] = 30000 + mesh.rank * 32
    moving.start().wait()
    assert (mean == make(30000.0 + 16 * (mesh.size - 1))).all()


@pytest.mark.mpi
def test_a_mean_of_bfloat16_is_rounded_once(mesh):
    mean = torch.full((3,), 197.0 if mesh.rank else 128.0).bfloat16()  # on three ranks their sum in 16 bits is another
    exact = (128 + 197 * (mesh.size - 1)) / mesh.size
    AllReduce(mesh, "mean")(mean)
    assert (mean == torch.tensor(exact).bfloat16()).all()


@pytest.mark.mpi(min_size=2)
def test_memory_of_a_call_under_way_is_refused_to_another(mesh):
    """Large arrays, so that no rank is done with the first call before it begins the second."""
    array, reduce = np.ones(1 << 20), AllReduce(mesh)
    moving = reduce.start(array, "first")
    for other in (array, torch.from_numpy(array)[5:9], array[-1:]):
        with pytest.raises(RuntimeError, match="second would change memory of first, which is under way; wait for it"):
            reduce.start(other, "second")
    beside = reduce.start(np.ones(3), "beside")
    moving.wait()
    beside.wait()
    assert (array == mesh.size).all() and (reduce(array[-1:]) == mesh.size**2).all()


@pytest.mark.mpi
def test_integers_have_a_sum_but_no_mean(mesh):
    assert AllReduce(mesh)(np.array([2])).tolist() == [2 * mesh.size]
    for integers in (np.array([1]), torch.tensor([1]), np.array([1], np.uint8)):
        with pytest.raises(ValueError, match=r"mean of 'count' \(.*int.*\) is not an integer; use reduction='sum'"):
            AllReduce(mesh, "mean")(integers, "count")


@pytest.mark.mpi
def test_a_parameter_may_be_averaged(mesh):
    parameter = torch.nn.Parameter(torch.full((3,), float(mesh.rank)))
    AllReduce(mesh, "mean")(parameter)
    assert parameter.tolist() == pytest.approx([(mesh.size - 1) / 2] * 3) and parameter.requires_grad


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction='max': it is 'sum' or 'mean'"):
        AllReduce(Mesh(None), "max")


@pytest.mark.mpi(min_size=2)
def test_who_closes_while_others_reduce_keeps_nobody_waiting(fresh_comm):
    """The others close too, when they have heard of it: alone, for the first one doesn't come again."""
    mesh = Mesh(fresh_comm())
    with pytest.raises(CollectiveMismatch, match="close"):
        if mesh.rank == 0:
            mesh.close()
        else:
            AllReduce(mesh)(np.ones(3))
    if mesh.rank:
        mesh.close()
    mesh.close()
