"""Sums through shared memory: right bits, the same on all ranks, nothing else touched; who disagrees is told."""

import gc
import random

import numpy as np
import pytest

from hpctrain import AllReduce, Mesh
from hpctrain.comm import nodes, shared_memory, windows
from hpctrain.comm.allreduce import all_reduce
from hpctrain.comm.node import FLAT_BYTES, Node
from hpctrain.comm.node_sum import NodeSum
from hpctrain.comm.nodes import join_node
from hpctrain.comm.ring import Ring
from hpctrain.comm.signature import CollectiveMismatch
from tests.comm import checks, node_checks
from tests.comm.arrays import FLOATS, INTEGERS
from tests.comm.test_mismatch import DIFFERENT
from tests.comm.watched import WatchedComm

pytestmark = pytest.mark.mpi(min_size=2)
PLACES = ("window", "elsewhere")
AROUND = [FLAT_BYTES + delta for delta in (-8, 0, 8)]  # bytes


def joined(comm) -> Ring:
    ring = Ring(comm)
    join_node(ring)
    return ring


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_every_dtype_gives_the_sum(comm, peers, shared_seed, dtype, place):
    size = np.dtype(dtype).itemsize
    lengths = [0, 1, comm.size - 1, comm.size + 1, 40, *(nbytes // size for nbytes in AROUND), 30_011, 100_003]
    assert node_checks.sums(comm, peers, dtype, lengths, place, seed=shared_seed) == []


@pytest.mark.parametrize("dtype", [">f8", ">f2", ">i4", "complex128", "clongdouble"])
@pytest.mark.parametrize("place", PLACES)
def test_other_byte_orders_and_wide_numbers_are_summed(comm, place, dtype):
    with Mesh(comm) as mesh:
        for length in (1, 100, 2047, 2048, 9000):
            reduce = AllReduce(mesh, algorithm="windows")
            array = reduce.empty(length, dtype) if place == "window" else np.empty(length, dtype)
            array[:] = np.arange(length) % 11 + comm.rank
            wanted = comm.size * (np.arange(length) % 11) + sum(range(comm.size))
            assert (reduce(array) == wanted).all() and array.dtype == np.dtype(dtype)
        del array


@pytest.mark.parametrize("place", PLACES)
def test_bfloat16_is_summed_in_float32(comm, peers, shared_seed, place):
    if comm.size > 3:
        pytest.skip("three ranks show the order of a sum; torch takes long to start on each")
    pytest.importorskip("torch")
    assert node_checks.sums(comm, peers, "bfloat16", [0, 5, 20_000, 200_001], place, seed=shared_seed) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("block_bytes", [64, 1000])
def test_every_size_of_block_and_stage_gives_the_sum(comm, peers, shared_seed, monkeypatch, place, block_bytes):
    monkeypatch.setattr("hpctrain.comm.crossing.BLOCK_BYTES", block_bytes)
    lengths = [9000, 10_001]
    assert node_checks.sums(comm, peers, "float64", lengths, place, stage_bytes=4096, seed=shared_seed) == []


@pytest.mark.parametrize("place", PLACES)
def test_many_calls_may_be_under_way(comm, peers, shared_seed, place):
    """More than a board has slots for; begun together, waited for in another order on each rank."""
    lengths = random.Random(shared_seed).choices([0, 3, 4096, 4097, 9000], k=50)
    assert node_checks.sums(comm, peers, "float64", lengths, place, stage_bytes=8192, seed=shared_seed) == []


@pytest.mark.parametrize("place", PLACES)
def test_who_is_held_up_changes_nothing(comm, peers, shared_seed, place):
    lengths = [9000, 5000, 30_000]
    how = {"stage_bytes": 4096, "seed": shared_seed, "held_up": True}
    assert node_checks.sums(comm, peers, "float64", lengths, place, **how) == []


@pytest.mark.parametrize("bug", node_checks.BUGS)
def test_the_checks_see_a_planted_bug(comm, peers, monkeypatch, bug):
    target, attribute, planted, place, lengths = node_checks.BUGS[bug]
    monkeypatch.setattr(target, attribute, planted)
    found = node_checks.sums(comm, peers, "float64", lengths, place, stage_bytes=4096, held_up=True)
    assert any(peers.everybody(found))


@pytest.mark.parametrize("patience", [0.0, 1.0])
@pytest.mark.parametrize("place", PLACES)
def test_calls_one_after_another_take_the_shorter_path(comm, peers, monkeypatch, place, patience):
    """Who loses patience on it goes on as others do."""
    monkeypatch.setattr("hpctrain.comm.node.PATIENCE", patience)
    with Mesh(comm) as mesh:
        reduce = AllReduce(mesh)
        for turn, length in enumerate([1, 100, 9000, 7, 30_000, 0, 100_003] * 3):
            array = np.empty(length) if place == "elsewhere" else reduce.empty(length, np.float64)
            array[:] = comm.rank + turn + np.arange(length) % 5
            if turn == 9:
                other = reduce.start(np.ones(9000), "other")
            reduce(array, "sum")
            assert (array == sum(range(comm.size)) + comm.size * (turn + np.arange(length) % 5)).all()
        other.wait()
        del array


@pytest.mark.parametrize("length", [10, 10_000])
@pytest.mark.parametrize("place", PLACES)
def test_a_mean_is_divided_once_and_may_be_started_again(comm, peers, place, length):
    with Mesh(comm) as mesh:
        mean = AllReduce(mesh, "mean")
        array = mean.empty(length, np.float64) if place == "window" else np.empty(length)
        operation = mean.prepare(array, "mean")
        assert operation.algorithm == "windows"
        for turn in range(3):
            array[:] = comm.rank + turn
            operation.start().wait()
            assert (array == (comm.size - 1) / 2 + turn).all()
        del array, operation


def test_who_waits_again_gets_the_same(comm):
    with Mesh(comm) as mesh:
        for algorithm in ("windows", "ring", "doubling"):
            array = np.ones(5)
            operation = AllReduce(mesh, algorithm=algorithm).prepare(array)
            operation.run()
            operation.wait()
            assert (array == comm.size).all()


def test_no_message_carries_data(comm):
    with Mesh(comm) as mesh:
        array = AllReduce(mesh).empty(100_000)
        before = vars(mesh.data.ring.counters).copy()
        AllReduce(mesh)(array)
        assert vars(mesh.data.ring.counters) == before
        del array


@pytest.mark.parametrize("calls", DIFFERENT.values(), ids=DIFFERENT)
def test_the_first_or_the_last_rank_may_differ(fresh_comm, peers, calls):
    for odd in {0, peers.size - 1}:
        assert checks.disagreement(fresh_comm(), seed=odd, calls=calls, odd=odd, in_node=True) == []


def test_random_disagreements_all_end_with_the_error(fresh_comm, shared_seed):
    for turn in range(20):
        assert checks.disagreement(fresh_comm(), shared_seed + turn, in_node=True) == []


def test_an_array_elsewhere_on_one_rank_is_told(fresh_comm):
    ring = joined(fresh_comm())
    shared = ring.node.allocate(1 << 20).view("f8")
    array = np.zeros(len(shared)) if ring.rank == 0 else shared
    ring.comm.Barrier()
    with pytest.raises(CollectiveMismatch, match="by one algorithm, with arrays all at one place in shared memory"):
        NodeSum(ring.node, array, "sum").wait()
    ring.close()


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "windows"])
def test_a_mean_on_one_rank_and_a_sum_on_another_are_told(fresh_comm, algorithm):
    mesh = Mesh(fresh_comm())
    with pytest.raises(CollectiveMismatch, match=r"divided by \d+ 'x'"):
        AllReduce(mesh, "mean" if mesh.rank == 0 else "sum", algorithm)(np.ones(5), "x")
    mesh.close()


def test_a_call_that_was_interrupted_is_finished_with_the_others(comm, peers, monkeypatch):
    """On the shorter path, by Ctrl-C say: who catches that and goes on keeps nobody waiting."""
    with Mesh(comm) as mesh:
        array, board = np.ones(5), mesh.data.ring.node.board
        if mesh.rank == 0:
            monkeypatch.setattr(board, "wait", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
            operation = AllReduce(mesh).prepare(array)
            with pytest.raises(KeyboardInterrupt):
                operation.run()
            monkeypatch.undo()
            operation.wait()
        else:
            AllReduce(mesh)(array)
        assert (array == comm.size).all()


def test_shared_memory_of_another_length_is_told(fresh_comm):
    ring = joined(fresh_comm())
    with pytest.raises(CollectiveMismatch, match="allocate"):
        ring.node.allocate(1000 + ring.rank)
    ring.close()


def test_a_barrier_on_one_rank_is_told_to_those_that_sum(fresh_comm):
    mesh = Mesh(fresh_comm())
    with pytest.raises(CollectiveMismatch, match="barrier"):
        if mesh.rank == 0:
            mesh.barrier()
        else:
            AllReduce(mesh)(np.ones(3), "loss")


def test_memory_that_somebody_looks_at_stays_when_the_mesh_is_closed(comm):
    with Mesh(comm) as mesh:
        array = AllReduce(mesh).empty(5000)
        array[:] = 1
        AllReduce(mesh)(array)
    assert (array == comm.size).all()
    array[:] = 2
    assert array.sum() == 10_000


def test_memory_that_nobody_looks_at_is_given_back(comm, peers):
    mesh = Mesh(comm)
    array = AllReduce(mesh).empty(5000)
    operation = AllReduce(mesh).prepare(array, "kept")  # which alone keeps no memory
    operation.start().wait()
    made = list(mesh.data.ring.node.windows)
    del array
    gc.collect()
    mesh.close()
    with pytest.raises(RuntimeError, match="the ring is closed"):
        operation.start()
    assert [window.is_held for window in made] == [False, False]
    assert [bool(window._window) for window in made] == [False, False]


def test_without_room_in_shared_memory_sums_go_by_messages(comm, peers, monkeypatch, capfd):
    if comm.rank == comm.size - 1:  # one rank that sees too little is enough
        monkeypatch.setattr(shared_memory, "shared_memory_free", lambda: 1 << 20)
    with Mesh(comm) as mesh:
        reduce = AllReduce(mesh)
        assert reduce.prepare(np.ones(5), "sum").algorithm == "ring"
        array = reduce.empty((3, 5))
        array[:] = 1
        assert (reduce(array) == comm.size).all()
        with pytest.raises(
            ValueError,
            match="algorithm='windows': the ranks share no memory, or unequally",
        ):
            AllReduce(mesh, algorithm="windows")
    told = peers.everybody(capfd.readouterr().err)
    assert told[0].count("MiB free") == 1 and "--shm-size=1g" in told[0] and not any(told[1:])


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("has_window", [False, True], ids=["without a window", "with one"])
def test_where_mpi_fails_on_one_rank_no_rank_waits_for_its_window(
    comm, monkeypatch, peers, capfd, num_nodes, has_window
):
    """At the program's end those that have one would wait for the rank that has none, and for ever."""
    from mpi4py import MPI

    if comm.size % num_nodes or comm.size == num_nodes:
        pytest.skip("equally many ranks on each node, two at least")
    before, made = list(windows._open), []

    def built(*arguments):
        made.append(Node(*arguments))
        if comm.rank > 0:
            return made[0]
        if not has_window:
            windows._open.pop()
        raise MPI.Exception(MPI.ERR_NO_MEM)

    monkeypatch.setattr(nodes, "Node", built)
    built.bytes_needed = Node.bytes_needed
    monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank % num_nodes)
    with Mesh(comm) as mesh:
        assert mesh.data.ring.node is None
        assert all(peers.everybody(windows._open == before))
        assert (AllReduce(mesh)(np.ones(5)) == comm.size).all()
    told = peers.everybody(capfd.readouterr().err)
    assert "rank 0: MPI gives no shared memory" in told[0] and not any(told[1:])
    windows._free(made[0].windows[0]._window)  # which all have here


def test_nodes_of_unequal_numbers_of_ranks_go_by_messages(comm, monkeypatch):
    monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank // (comm.size - 1))
    with Mesh(comm) as mesh:
        assert mesh.data.ring.node is None
        assert (AllReduce(mesh)(np.ones(5)) == comm.size).all()


@pytest.fixture(params=["consecutive", "in turns"])
def two_nodes(comm, monkeypatch, request):
    """Half of the ranks on each."""
    if comm.size % 2 or comm.size < 4:
        pytest.skip("two nodes of at least two ranks")
    where = comm.rank // (comm.size // 2) if request.param == "consecutive" else comm.rank % 2
    monkeypatch.setattr(nodes, "name_of_node", lambda: where)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex64", "int8", "int64"])
def test_between_nodes_the_sum_is_right_too(comm, peers, two_nodes, shared_seed, dtype, place):
    lengths = [0, 1, 40, 9000, 100_003]
    how = {"kind": "whole", "stage_bytes": 16 << 10, "seed": shared_seed}
    assert node_checks.sums(comm, peers, dtype, lengths, place, **how) == []


def test_between_nodes_a_sum_of_16_bits_is_rounded_once(comm, two_nodes):
    with Mesh(comm) as mesh:
        array = AllReduce(mesh).empty(20_000, np.float16)
        array[:] = 2048 if mesh.rank == 0 else 1  # of which no two add up to something new in 16 bits
        AllReduce(mesh)(array)
        assert (array == np.float16(2048 + comm.size - 1)).all()
        del array


def test_each_byte_leaves_a_node_once_for_each_half_of_the_way(comm, two_nodes):
    with Mesh(comm) as mesh:
        array = AllReduce(mesh).empty(1 << 20)
        AllReduce(mesh)(array)
        sent = comm.allreduce(mesh.data.ring.node.across.counters.bytes_sent)
        assert sent == 2 * array.nbytes  # over two nodes: 2 (2 - 1) / 2 from each
        del array


@pytest.mark.parametrize("calls", DIFFERENT.values(), ids=DIFFERENT)
def test_between_nodes_a_rank_that_differs_is_told_to_all(fresh_comm, two_nodes, calls):
    assert checks.disagreement(fresh_comm(), seed=1, calls=calls, odd=1, in_node=True) == []


def test_nothing_stays_posted_of_what_crosses_when_ranks_disagree(fresh_comm, two_nodes, peers):
    ring = joined(fresh_comm())
    across = ring.node.across = Ring(WatchedComm(ring.node.across.comm))
    NodeSum(ring.node, np.ones(10_000), "crosses").start()
    peers.everybody()
    with pytest.raises(CollectiveMismatch):
        NodeSum(ring.node, np.ones(5), str(ring.rank == 0)).wait()
    ring.close()
    assert [request for request in across.comm.pending if request.what == "receive"] == []


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_nodes_that_differ_are_told_to_all(fresh_comm, two_nodes, names):
    ring = joined(fresh_comm())
    name = names[ring.rank in ring.node.members and ring.node.across.rank]
    with pytest.raises(CollectiveMismatch, match=f"'{names[0]}.*'{names[1]}|'{names[1]}.*'{names[0]}"):
        NodeSum(ring.node, np.ones(10), name).wait()
    ring.close()


def test_the_algorithm_may_be_chosen(comm):
    with Mesh(comm) as mesh:
        array = np.ones(1 << 20)
        wanted = {"auto": "ring", "ring": "ring", "windows": "windows", "doubling": "doubling"}
        assert {each: AllReduce(mesh, algorithm=each).prepare(array).algorithm for each in wanted} == wanted
        with pytest.raises(ValueError, match="algorithm='fast': it is auto, ring, doubling, windows"):
            AllReduce(mesh, algorithm="fast")
        assert all_reduce(mesh.data.ring, array[:5]).algorithm == "windows"
        assert (AllReduce(mesh, algorithm="doubling")(array) == comm.size).all()


def test_who_waits_for_a_sum_uses_next_to_nothing(comm, peers):
    with Mesh(comm) as mesh:
        prepare = lambda: ((lambda: AllReduce(mesh)(np.ones(9))), (lambda: None))  # noqa: E731
        problems, _ = checks.waiting(comm, peers, prepare, seconds=0.4)
        assert problems == []


def test_what_a_node_needs_is_what_it_takes(comm):
    ring = Ring(comm)
    join_node(ring, stage_bytes=1 << 16)
    taken = sum(part.size for part in ring.node.windows[0].parts)
    ring.close()
    assert 0 <= taken - Node.bytes_needed(comm.size, 1 << 16) < 4096
