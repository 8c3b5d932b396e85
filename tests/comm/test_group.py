"""What groups and meshes do besides the ring: everybody arrives, everybody gets what the root had, nothing is used up.

One rank alone gives the same answers as many, and needs no MPI.
"""

import numpy as np
import pytest

from hpctrain.comm import group as group_module
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh, duplicate
from hpctrain.plan.grid import Grid
from tests.harness.launch import run_python

FACTS = {"name": 'Zoë 漢字 \U0001f600 "quoted" \n', "empty": "", "numbers": [1, 2.5, -1e300], "none": None}


@pytest.fixture
def group(comm):
    group = Group(duplicate(comm))
    yield group
    group.close()


@pytest.mark.mpi
def test_nobody_leaves_a_barrier_before_the_last_has_come(group, peers, shared_tmp_path):
    for turn in range(5):
        (shared_tmp_path / f"{turn} {peers.rank}").touch()
        group.barrier()
        assert len(list(shared_tmp_path.glob(f"{turn} *"))) == peers.size


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i1", "i8", "u2", "c8", "?", ">f4", "S5", "M8[s]"])
def test_broadcast_brings_the_roots_bits(group, peers, shared_seed, dtype):
    for root in {0, peers.size - 1}:
        for shape in ((), (0,), (1, 0, 2), (7,), (3, 5)):
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            rng = np.random.default_rng(shared_seed)
            wanted = rng.integers(0, 2 if dtype == "?" else 256, nbytes, np.uint8).view(dtype).reshape(shape)
            array = wanted.copy() if peers.rank == root else np.zeros_like(wanted)
            group.broadcast(array, root)
            assert array.tobytes() == wanted.tobytes() and array.shape == shape


@pytest.mark.mpi
def test_a_broadcast_in_pieces_brings_everything(group, peers, monkeypatch):
    monkeypatch.setattr(group_module, "PIECE_BYTES", 1000)
    for nbytes in (999, 1000, 1001, 2003):
        array = np.arange(nbytes).astype(np.uint8) if peers.rank == 0 else np.zeros(nbytes, np.uint8)
        group.broadcast(array)
        assert np.array_equal(array, np.arange(nbytes).astype(np.uint8))


@pytest.mark.mpi
def test_a_broadcast_refuses_what_it_cannot_fill(group):
    for refused in ([1, 2], np.ones((4, 4)).T[1:], np.broadcast_to(1.0, 3)):
        with pytest.raises(ValueError):
            group.broadcast(refused)


@pytest.mark.mpi
def test_facts_of_any_length_travel(group, peers):
    mine = {**FACTS, "rank": peers.rank, "long": "é" * (10 ** min(peers.rank, 5))}
    everybody = [{**mine, "rank": rank, "long": "é" * (10 ** min(rank, 5))} for rank in range(peers.size)]
    assert group.all_gather_json(mine) == everybody
    assert group.gather_json(mine) == (everybody if peers.rank == 0 else None)
    assert group.broadcast_json(mine, root=peers.size - 1) == everybody[-1]
    assert group.all_gather_json(None) == [None] * peers.size


@pytest.mark.mpi
def test_facts_come_back_the_same_on_one_rank_as_on_many(group, peers):
    assert group.all_gather_json({1: (2, 3)}) == [{"1": [2, 3]}] * peers.size
    assert group.broadcast_json((1, 2)) == [1, 2]


@pytest.mark.mpi
@pytest.mark.parametrize("order", ["replica-fastest", "stage-fastest"])
def test_each_stage_sums_over_its_own_replicas(comm, peers, order):
    for stages in range(1, peers.size + 1):
        if peers.size % stages:
            continue
        grid = Grid(stages, peers.size // stages, order)
        with Mesh(comm, grid) as mesh:
            assert (mesh.stage, mesh.replica) == grid.coordinate(peers.rank)
            members = grid.replicas_of(mesh.stage)
            assert (mesh.data.size, mesh.data.rank) == (len(members), members.index(peers.rank))
            assert mesh.data.all_gather_json(mesh.rank) == members
            array = np.array([2.0**peers.rank, 1])
            mesh.data.ring.all_reduce(array).wait()
            assert array.tolist() == [sum(2.0**rank for rank in members), len(members)]
            everything = np.array([2**peers.rank])
            mesh.world.ring.all_reduce(everything).wait()
            assert everything[0] == 2**peers.size - 1


@pytest.mark.mpi
def test_a_mesh_is_built_from_a_part_of_the_ranks(comm, peers):
    part = comm.Split(peers.rank % 2, -peers.rank)
    with Mesh(part, Grid(1, part.size)) as mesh:
        members = mesh.world.all_gather_json(peers.rank)
        assert members == [rank for rank in reversed(range(peers.size)) if rank % 2 == peers.rank % 2]
        array = np.array([peers.rank])
        mesh.data.ring.all_reduce(array).wait()
        assert array[0] == sum(members)
    part.Free()


@pytest.mark.mpi
def test_a_layout_that_does_not_fit_is_refused(comm, peers):
    with pytest.raises(ValueError, match=f"layout of {2 * peers.size} ranks does not fit {peers.size}"):
        Mesh(comm, Grid(2, peers.size))


@pytest.mark.mpi(min_size=2)
def test_thousands_of_meshes_use_nothing_up(comm, peers):
    if peers.size != 2:
        pytest.skip("two ranks build and close them")
    resident = []
    for turn in range(800):  # 2400 communicators, more than MPICH has at a time, and windows
        with Mesh(comm, Grid(1 + turn % 2, 2 - turn % 2)) as mesh:
            mesh.data.ring.all_reduce(np.ones(10)).wait()
        if turn % 200 == 199:
            resident.append(_resident_bytes())
    assert resident[-1] - resident[0] < 2 << 20, resident


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_one_rank_alone_needs_neither_mpi_nor_torch():
    code = """
import sys
import numpy as np
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.ring import Ring
array = np.arange(5.0)
for operation in ("all_reduce", "reduce_scatter", "all_gather"):
    collective = getattr(Ring(), operation)(array).start()
    assert collective.done and collective.poll()
    collective.wait()
with Mesh() as mesh:
    mesh.data.ring.all_reduce(array).wait()
    mesh.world.barrier()
    mesh.world.broadcast(array)
    assert mesh.world.all_gather_json({"a": 1}) == [{"a": 1}] and mesh.world.broadcast_json(3) == 3
    assert (mesh.rank, mesh.stage, mesh.replica, mesh.data.size) == (0, 0, 0, 1)
Group().close()
assert array.tolist() == [0, 1, 2, 3, 4]
assert not {"mpi4py", "torch"} & set(sys.modules)
"""
    result = run_python("-c", code, timeout=60)
    assert result.returncode == 0, result
