"""Which device each rank takes: by its place on its node, never by its rank in the world."""

import pytest

from hpctrain.plan.devices import choose, choose_all, disagreement, shared

FOUR = ["a", "b", "c", "d"]
PLACES = {  # nodes by rank, what each rank sees, the device that it takes
    "one device": ([1] * 4, [["a"]] * 4, [0, 0, 0, 0]),
    "two devices": ([1] * 4, [["a", "b"]] * 4, [0, 1, 0, 1]),
    "a device each": ([1] * 4, [FOUR] * 4, [0, 1, 2, 3]),
    "more devices than ranks": ([1] * 2, [FOUR] * 2, [0, 1]),
    "two nodes": ([1, 1, 2, 2], [["a", "b"]] * 2 + [["c", "d"]] * 2, [0, 1, 0, 1]),
    "ranks in turn on two nodes": ([1, 2, 1, 2], [["a", "b"], ["c", "d"]] * 2, [0, 0, 1, 1]),
    "each rank sees its own": ([1] * 4, [["a"], ["b"], ["c"], ["d"]], [0, 0, 0, 0]),
    "two ranks see two, two see the others": ([1] * 4, [["a", "b"], ["c", "d"]] * 2, [0, 0, 1, 1]),
    "none": ([1] * 2, [[], []], [None, None]),
    "none on the second node": ([1, 2], [["a"], []], [0, None]),
}


@pytest.mark.parametrize("nodes, visible, chosen", PLACES.values(), ids=PLACES)
def test_who_takes_which(nodes, visible, chosen):
    assert choose_all(nodes, visible) == chosen


@pytest.mark.parametrize("num_visible, chosen", [(0, [None] * 4), (1, [0] * 4), (2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])])
def test_the_choice_of_four_local_ranks(num_visible, chosen):
    assert [choose(num_visible, local_rank) for local_rank in range(4)] == chosen


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 8])
def test_a_device_is_there_and_none_is_taken_twice_before_all_are_taken(num_nodes, num_devices, per_node):
    nodes = [node for node in range(num_nodes) for _ in range(per_node)]
    visible = [[f"{node}.{number}" for number in range(num_devices)] for node in nodes]
    chosen = choose_all(nodes, visible)
    taken = [visible[rank][device] for rank, device in enumerate(chosen)]
    assert len(set(taken)) == num_nodes * min(per_node, num_devices)
    lines = shared(["n"] * len(nodes), visible, chosen)
    assert bool(lines) == (per_node > num_devices)


def test_ranks_that_share_a_device_are_named():
    hosts, visible = ["n1", "n1", "n1", "n2"], [["a", "b"]] * 3 + [["c"]]
    assert shared(hosts, visible, choose_all([1, 1, 1, 2], visible)) == ["n1: ranks 0, 2 share device a"]


def test_containers_that_hide_their_memory_from_each_other_but_not_their_device_are_found():
    assert shared(["n1", "n1"], [["a"], ["a"]], choose_all([1, 2], [["a"], ["a"]])) == ["n1: ranks 0, 1 share device a"]


@pytest.mark.parametrize(
    "chosen, line",
    [
        ([0, None], "rank 1 on n2 sees no CUDA device, rank 0 on n1 does"),
        ([None, 0], "rank 0 on n1 sees no CUDA device, rank 1 on n2 does"),
        ([None, None, 0], "rank 0 on n1 sees no CUDA device, rank 2 on n3 does; 2 of 3 ranks see none"),
        ([0, 1], None),
        ([None, None], None),
    ],
)
def test_ranks_that_differ_are_named_with_their_hosts(chosen, line):
    assert disagreement(["n1", "n2", "n3"], chosen) == line
