"""torch tensors on the ring: bfloat16, which NumPy lacks, and tensors that carry a gradient, each in its own memory.

On three ranks, the fewest that show the order of a sum: torch takes long to start on each.
"""

import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import duplicate
from tests.comm import checks

pytestmark = pytest.mark.mpi
SIZE = 3


@pytest.fixture
def torch(peers):
    if peers.size != SIZE:
        pytest.skip(f"{SIZE} ranks run this")
    return pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["whole", "random"])
def test_every_small_length_of_bfloat16_is_summed_in_float32_and_rounded_once(torch, comm, peers, shared_seed, kind):
    assert checks.sums(comm, peers, "bfloat16", range(41), kind=kind, segment_bytes=16, seed=shared_seed) == []


@pytest.mark.parametrize("operation", checks.OPERATIONS[1:])
def test_the_other_operations_move_bfloat16(torch, comm, peers, shared_seed, operation):
    lengths = [0, 1, 7, 1000, 30_011]
    assert checks.sums(comm, peers, "bfloat16", lengths, operation=operation, seed=shared_seed) == []


def test_partial_sums_of_bfloat16_travel_in_four_bytes(torch, comm):
    assert checks.traffic(comm, "bfloat16", 1001, 200) == []


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "complex64"])
def test_a_tensor_is_summed_in_place(torch, make_ring, peers, name):
    dtype = getattr(torch, name)
    base = torch.zeros(4, 5, dtype=dtype)
    base[1:3] = peers.rank + 1
    make_ring().all_reduce(base[1:3]).wait()
    assert base[1:3].eq(sum(range(peers.size + 1))).all() and not base[::3].any() and base.dtype == dtype


def test_a_parameter_with_a_gradient_is_summed_in_place(torch, make_ring, peers):
    parameter = torch.nn.Parameter(torch.full((3, 2), peers.rank + 1.0))
    (parameter * 2).sum().backward()
    ring = make_ring()
    ring.all_reduce(parameter).wait()
    ring.all_reduce(parameter.grad).wait()
    assert parameter.detach().eq(sum(range(peers.size + 1))).all() and parameter.requires_grad and parameter.is_leaf
    assert parameter.grad.eq(2 * peers.size).all()


def test_an_empty_parameter_keeps_its_shape(torch, make_ring):
    empty = torch.nn.Parameter(torch.empty(1, 0, 2))
    make_ring().all_reduce(empty).wait()
    assert empty.shape == (1, 0, 2)


@pytest.mark.parametrize("name", ["bool", "bfloat16", "float16", "int64", "complex64"])
def test_broadcast_brings_tensors_of_any_dtype(torch, comm, peers, name):
    group = Group(duplicate(comm))
    wanted = (torch.arange(40) % 3).reshape(5, 8).to(getattr(torch, name))
    tensor = wanted.clone() if peers.rank == 0 else torch.zeros_like(wanted)
    group.broadcast(tensor)
    assert torch.equal(tensor, wanted)
    group.close()


def test_bool_tensors_are_gathered_but_not_summed(torch, make_ring, peers):
    mask = torch.zeros(peers.size, dtype=torch.bool)
    mask[peers.rank] = True
    ring = make_ring()
    with pytest.raises(ValueError, match="a sum of b1 has no meaning"):
        ring.all_reduce(mask)
    ring.all_gather(mask).wait()
    assert mask.all()
