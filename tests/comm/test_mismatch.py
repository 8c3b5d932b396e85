"""Ranks that make different collective calls all end with an error that names both, always, whatever else is under way.

Each case has a communicator of its own that is not used again. Closing afterwards returns, and new groups work.
"""

import itertools

import numpy as np
import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.ring import Ring
from hpctrain.comm.signature import CollectiveMismatch
from hpctrain.plan.grid import Grid
from tests.comm import checks

pytestmark = pytest.mark.mpi(min_size=2)

DIFFERENT = {
    "length": (("all_reduce", "float64", 4096, "x"), ("all_reduce", "float64", 4098, "x")),
    "rows": (("all_reduce", "float32", 100 * 256, "x"), ("all_reduce", "float32", 200 * 256, "x")),
    "dtype of equal bytes": (("all_reduce", "float32", 200, "x"), ("all_reduce", "float64", 100, "x")),
    "dtype of equal length": (("all_reduce", "float32", 100, "x"), ("all_reduce", "int32", 100, "x")),
    "byte order": (("all_reduce", "<f4", 10, "x"), ("all_reduce", "float64", 5, "x")),
    "operation": (("all_reduce", "float32", 100, "x"), ("reduce_scatter", "float32", 100, "x")),
    "name": (("all_reduce", "float32", 1, "loss"), ("all_reduce", "float32", 1, "grad")),
    "nothing against something": (("all_reduce", "float32", 0, "x"), ("all_reduce", "float32", 100, "x")),
    "something against nothing": (("all_reduce", "float32", 100, "x"), ("all_reduce", "float32", 0, "x")),
    "large messages": (("all_reduce", "float64", 90_000, "x"), ("all_gather", "float64", 90_000, "x")),
}


@pytest.mark.parametrize("calls", DIFFERENT.values(), ids=DIFFERENT)
def test_the_first_the_last_or_a_rank_between_may_differ(fresh_comm, peers, calls):
    for odd in {0, peers.size // 2, peers.size - 1}:
        assert checks.disagreement(fresh_comm(), seed=odd, calls=calls, odd=odd) == []


def test_any_rank_may_be_the_one_that_differs(fresh_comm, peers):
    for odd in range(peers.size):
        assert checks.disagreement(fresh_comm(), seed=odd, calls=DIFFERENT["length"], odd=odd) == []


def test_fifty_random_disagreements_all_end_with_the_error(fresh_comm, shared_seed):
    for turn in range(50):
        assert checks.disagreement(fresh_comm(), shared_seed + turn) == []


def test_names_that_differ_only_late_are_told_apart(fresh_comm, peers):
    ring = Ring(fresh_comm())
    with pytest.raises(CollectiveMismatch):
        ring.all_reduce(np.ones(2), "weights of layer " * 10 + str(peers.rank == 0)).wait()
    ring.close()


def test_every_rank_may_call_something_of_its_own(fresh_comm, peers):
    ring = Ring(fresh_comm())
    with pytest.raises(CollectiveMismatch, match=rf"x {peers.rank + 1}\)|rank"):
        ring.all_reduce(np.ones(peers.rank + 1), "own").wait()
    ring.close()


@pytest.mark.parametrize("length", [1, 5])
def test_a_call_that_one_rank_makes_in_addition_is_told(fresh_comm, peers, length):
    ring = Ring(fresh_comm())
    with pytest.raises(CollectiveMismatch, match=r"'loss' .*'grad'|'grad' .*'loss'"):
        if peers.rank == 0:
            ring.all_reduce(np.ones(1), "loss").wait()
        ring.all_reduce(np.ones(length), "grad").wait()
    ring.close()


def test_the_same_calls_in_another_order_are_told(fresh_comm, peers):
    ring = Ring(fresh_comm())
    names = ["a", "b"] if peers.rank == peers.size - 1 else ["b", "a"]
    under_way = []
    with pytest.raises(CollectiveMismatch, match=r"'a' .*'b'|'b' .*'a'"):
        for name in names:
            under_way.append(ring.all_reduce(np.ones(10), name).start())
        for collective in under_way:
            collective.wait()
    ring.close()


def test_who_still_calls_while_a_rank_closes_gets_the_error(fresh_comm, peers):
    for closing in range(peers.size):
        ring = Ring(fresh_comm())
        with pytest.raises(CollectiveMismatch, match=f"rank {closing} call 1 close"):
            ring.all_reduce(np.ones(10)).wait()
            if peers.rank == closing:
                ring.close()
            else:
                ring.all_reduce(np.ones(10)).wait()
        ring.close()


def test_who_calls_alone_while_all_others_close_gives_all_the_error(fresh_comm, peers):
    for calling in range(peers.size):
        ring = Ring(fresh_comm())
        with pytest.raises(CollectiveMismatch, match=f"rank {calling} call 0 all_reduce"):
            if peers.rank == calling:
                ring.all_reduce(np.ones(10)).wait()
            else:
                ring.close()
        ring.close()


GROUP_CALLS = [
    lambda group: group.barrier(),
    lambda group: group.broadcast(np.ones(10)),
    lambda group: group.broadcast(np.ones(11)),
    lambda group: group.broadcast(np.ones(10), root=1),
    lambda group: group.broadcast(np.ones(20, np.float32)),
    lambda group: group.gather_json("fact"),
    lambda group: group.ring.all_reduce(np.ones(10)).wait(),
    lambda group: group.close(),
]


def test_calls_of_a_group_are_compared_too(fresh_comm, peers):
    for odd, (usual, other) in enumerate(itertools.permutations(GROUP_CALLS, 2)):
        group = Group(fresh_comm())
        with pytest.raises(CollectiveMismatch):
            (other if peers.rank == odd % peers.size else usual)(group)
        group.close()


def test_a_group_closes_and_another_works_after_a_disagreement(fresh_comm, peers):
    for turn in range(5):
        group = Group(fresh_comm())
        with pytest.raises(CollectiveMismatch):
            group.ring.all_reduce(np.ones(100_000), "large").start()
            group.ring.all_reduce(np.ones(100_000), "large").start()
            group.ring.all_reduce(np.ones(1), str(peers.rank == turn % peers.size)).wait()
        group.close()
        assert not group.progress._active
        after = Group(fresh_comm())
        array = np.full(1000, peers.rank)
        after.ring.all_reduce(array).wait()
        assert np.all(array == sum(range(peers.size)))
        after.close()


def test_a_mesh_closes_after_a_disagreement(fresh_comm, peers):
    mesh = Mesh(fresh_comm(), Grid(1, peers.size))
    with pytest.raises(CollectiveMismatch):
        mesh.data.ring.all_reduce(np.ones(50_000), "large").start()
        mesh.data.ring.all_reduce(np.ones(1), str(peers.rank == 0)).wait()
    mesh.close()


def test_a_disagreement_is_told_to_whoever_waits_for_something_else(fresh_comm, peers):
    mesh = Mesh(fresh_comm(), Grid(1, peers.size))
    with pytest.raises(CollectiveMismatch):
        mesh.data.ring.all_reduce(np.ones(1), str(peers.rank == 0)).start()
        mesh.world.progress.wait(lambda: False)
    mesh.close()
