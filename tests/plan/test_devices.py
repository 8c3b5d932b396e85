"""Which device each rank takes: by its place on its node, never by its rank in the world."""

import pytest

from hpctrain.plan.devices import Sight, choose, choose_all, disagreement, settle, shared

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


def sight(host="n1", node=1, devices=("a", "b"), torch_cuda="13.0", has_cupy=True):
    return Sight(host, node, list(devices), None if devices else "no CUDA driver", torch_cuda, has_cupy)


@pytest.mark.parametrize("wish", ["auto", "cuda"])
def test_all_ranks_train_on_devices_where_all_have_one(wish):
    assert settle(wish, [sight(), sight()], travels=True) == ([0, 1], [])


def test_ranks_on_one_device_are_told_of():
    chosen, notes = settle("auto", [sight(devices=["a"])] * 2, travels=True)
    assert chosen == [0, 0] and notes == ["n1: ranks 0, 1 share device a; they take turns on it"]


def test_nobody_asks_for_a_device_of_who_trains_on_the_host():
    assert settle("cpu", [sight(), sight(devices=[])], travels=True) == ([None, None], [])


def test_without_any_device_auto_trains_on_the_host_and_says_nothing():
    assert settle("auto", [sight(devices=[], torch_cuda=None)] * 2, travels=True) == ([None, None], [])


@pytest.mark.parametrize("wish", ["auto", "cuda"])
def test_a_rank_without_a_device_among_ranks_with_one_is_an_error(wish):
    with pytest.raises(ValueError) as caught:
        settle(wish, [sight(), sight("n2", 2, [])], travels=True)
    told = f"--device {wish}: rank 1 on n2 sees no CUDA device, rank 0 on n1 does"
    assert str(caught.value).startswith(told) and "--device cpu" in str(caught.value)


LACKS = {
    "no device": (sight(devices=[]), "rank 0 on n1 has none: no CUDA driver"),
    "torch": (sight(torch_cuda=None), "rank 0 on n1 has a torch that is built without CUDA"),
    "cupy": (sight(has_cupy=False), "rank 0 on n1 has no CuPy"),
}


@pytest.mark.parametrize("one, told", LACKS.values(), ids=LACKS)
def test_what_is_asked_for_and_cannot_be_had_is_an_error_that_says_why(one, told):
    with pytest.raises(ValueError) as caught:
        settle("cuda", [one], travels=True)
    assert str(caught.value).startswith(f"--device cuda: {told}")


def test_auto_says_why_devices_are_left_alone():
    for one, told in (LACKS["torch"], LACKS["cupy"]):
        chosen, notes = settle("auto", [one], travels=True)
        assert chosen == [None] and len(notes) == 1 and told in notes[0]


def test_one_rank_alone_adds_nothing_up_and_needs_no_cupy():
    assert settle("cuda", [sight(has_cupy=False)], travels=False) == ([0], [])
