"""Sum and mean as users call them. Of tensors on few ranks: torch takes long to start on each."""

import numpy as np
import pytest

from hpctrain import AllReduce, Mesh
from hpctrain.comm.signature import CollectiveMismatch

MOST_WITH_TORCH = 3  # the fewest that show the order of a sum
SHAPES = [(), (0,), (3, 5), (1,)]
NO_MEAN = r"mean of 'count' \(.*int.*\) is not an integer; use reduction='sum'"


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


@pytest.fixture
def torch(peers):
    if peers.size > MOST_WITH_TORCH:
        pytest.skip(f"{MOST_WITH_TORCH} ranks are enough")
    return pytest.importorskip("torch")


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", ">f8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_is_the_sum_divided(mesh, dtype, shape):
    check_sum_and_mean(mesh, np.full, dtype, shape)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_of_tensors_is_the_sum_divided(torch, mesh, dtype, shape):
    check_sum_and_mean(mesh, torch.full, getattr(torch, dtype), shape)


def check_sum_and_mean(mesh, make, dtype, shape):
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
def test_a_mean_of_16_bits_is_finite_though_its_sum_is_not(mesh):
    check_mean_of_16_bits(mesh, lambda x: np.full(5, x, np.float16))


@pytest.mark.mpi
def test_a_mean_of_16_bit_tensors_is_finite_though_its_sum_is_not(torch, mesh):
    check_mean_of_16_bits(mesh, lambda x: torch.full((5,), x).half())


def check_mean_of_16_bits(mesh, make):
    mean = make(40000.0)
    moving = AllReduce(mesh, "mean").start(mean)
    moving.wait()
    assert (mean == 40000).all()
    mean[...] = 30000 + mesh.rank * 32
    moving.start().wait()
    assert (mean == make(30000.0 + 16 * (mesh.size - 1))).all()


@pytest.mark.mpi
def test_a_mean_of_bfloat16_is_rounded_once(torch, mesh):
    mean = torch.full((3,), 197.0 if mesh.rank else 128.0).bfloat16()  # on three ranks their sum in 16 bits is another
    exact = (128 + 197 * (mesh.size - 1)) / mesh.size
    AllReduce(mesh, "mean")(mean)
    assert (mean == torch.tensor(exact).bfloat16()).all()


@pytest.mark.mpi(min_size=2)
def test_memory_of_a_call_under_way_is_refused_to_another(mesh, peers):
    array = np.ones(1 << 20)
    check_memory_under_way(mesh, peers, array, [array, array[-1:]])


@pytest.mark.mpi(min_size=2)
def test_memory_of_a_call_under_way_is_refused_to_a_tensor(torch, mesh, peers):
    array = np.ones(1 << 20)
    check_memory_under_way(mesh, peers, array, [torch.from_numpy(array)[5:9]])


def check_memory_under_way(mesh, peers, array, others):
    """Rank 0 begins when all others were refused: until then nobody's first call can be done. Then it is their turn."""
    reduce = AllReduce(mesh)
    for late in (0, 1):
        array[...] = 1
        if mesh.rank != late:
            moving = reduce.start(array, "first")
            for other in others:
                with pytest.raises(RuntimeError, match="second would change memory of first, which is under way; wait"):
                    reduce.start(other, "second")
        peers.everybody()
        if mesh.rank == late:
            moving = reduce.start(array, "first")
        beside = reduce.start(np.ones(3), "beside")
        moving.wait()
        beside.wait()
        assert (array == mesh.size).all() and (reduce(array[-1:]) == mesh.size**2).all()


@pytest.mark.mpi
def test_integers_have_a_sum_but_no_mean(mesh):
    assert AllReduce(mesh)(np.array([2])).tolist() == [2 * mesh.size]
    for integers in (np.array([1]), np.array([1], np.uint8)):
        with pytest.raises(ValueError, match=NO_MEAN):
            AllReduce(mesh, "mean")(integers, "count")


@pytest.mark.mpi
def test_a_tensor_of_integers_has_no_mean(torch, mesh):
    with pytest.raises(ValueError, match=NO_MEAN):
        AllReduce(mesh, "mean")(torch.tensor([1]), "count")


@pytest.mark.mpi
def test_a_parameter_may_be_averaged(torch, mesh):
    parameter = torch.nn.Parameter(torch.full((3,), float(mesh.rank)))
    AllReduce(mesh, "mean")(parameter)
    assert parameter.tolist() == pytest.approx([(mesh.size - 1) / 2] * 3) and parameter.requires_grad


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction='max': it is 'sum' or 'mean'"):
        AllReduce(Mesh(None), "max")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "doubling"])
def test_what_was_never_started_does_not_say_that_it_is_done(mesh, algorithm):
    """Its array is what it was; to wait for it starts it."""
    array = np.ones(3)
    operation = AllReduce(mesh, algorithm=algorithm).prepare(array, "prepared")
    with pytest.raises(RuntimeError, match="prepared has not been started; start"):
        operation.poll()
    operation.wait()
    assert operation.poll() and array.tolist() == [mesh.size] * 3


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


@pytest.mark.parametrize(
    "shape, dtype, words",
    [
        (-1, "f4", "shape=-1: a length is negative"),
        ((2, -1), "f4", r"shape=\(2, -1\): a length is negative"),
        (3, object, "arrays of object cannot travel"),
        (3, "no such", "dtype=no such: it is no dtype of NumPy"),
    ],
)
def test_an_array_that_cannot_be_is_refused(shape, dtype, words):
    with Mesh(None) as mesh, pytest.raises(ValueError, match=words):
        AllReduce(mesh).empty(shape, dtype)


@pytest.mark.parametrize("shape", [(), 4, (2, 0), [3, 5]])
def test_an_empty_array_has_the_shape_asked_for(shape):
    with Mesh(None) as mesh:
        array = AllReduce(mesh).empty(shape, ">f8")
    assert (array.shape, array.dtype) == (np.empty(shape).shape, np.dtype(">f8"))
