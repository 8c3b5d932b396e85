"""Which all-reduce is chosen, and the steps of recursive doubling: pure, for any number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hpctrain.plan.allreduce import BUILT_IN, by_messages, choose, nodes_of
from hpctrain.plan.doubling import Kind, steps

RANKS = some.integers(1, 70)


@given(RANKS)
def test_doubling_brings_every_share_to_every_rank_once(num_ranks):
    """Runs the steps of all ranks against each other, with the ranks whose shares each has."""
    have = [[rank] for rank in range(num_ranks)]
    left = [steps(rank, num_ranks) for rank in range(num_ranks)]
    while any(left):
        moved = False
        for rank in range(num_ranks):
            if not left[rank]:
                continue
            kind, peer = left[rank][0]
            if not left[peer] or left[peer][0].peer != rank or kind in (Kind.ADD, Kind.RECEIVE):
                continue
            if kind is Kind.EXCHANGE:
                assert left[peer][0].kind is Kind.EXCHANGE
                have[rank] = have[peer] = have[min(rank, peer)] + have[max(rank, peer)]
            else:
                have[peer] = have[peer] + have[rank] if left[peer][0].kind is Kind.ADD else have[rank]
            del left[rank][0], left[peer][0]
            moved = True
        assert moved, left
    assert all(sorted(each) == list(range(num_ranks)) and each == have[0] for each in have)


@given(RANKS, some.integers(0, 1 << 30))
def test_more_bytes_never_bring_doubling_back(num_ranks, nbytes):
    if by_messages(nbytes, num_ranks) == "ring":
        assert by_messages(nbytes + 1000, num_ranks) == "ring" or num_ranks == 1


@pytest.mark.parametrize(
    "num_ranks, nbytes, wanted",
    [
        (2, 64, "doubling"),
        (2, 256 << 10, "doubling"),
        (2, (256 << 10) + 1, "ring"),
        (4, 100_000, "doubling"),
        (4, 250_000, "doubling"),
        (5, 64, "doubling"),
        (64, 250_000, "doubling"),
    ],
)
def test_messages_are_few_or_short(num_ranks, nbytes, wanted):
    assert by_messages(nbytes, num_ranks) == wanted


@pytest.mark.parametrize(
    "nbytes, takes, in_window, spans_nodes, wanted",
    [
        (100, True, False, False, "windows"),
        (100, True, True, True, "windows"),
        (100, False, False, True, "doubling"),
        (100, False, False, False, "ring"),
        (BUILT_IN.largest_staged, True, False, False, "windows"),
        (BUILT_IN.largest_staged + 1, True, False, False, "ring"),
        (1 << 30, True, True, False, "windows"),
        (1 << 30, False, False, True, "ring"),
    ],
)
def test_auto_goes_by_place_and_size(nbytes, takes, in_window, spans_nodes, wanted):
    assert choose("auto", nbytes, 8, takes, in_window, spans_nodes) == wanted


def test_what_is_compressed_goes_by_the_bytes_of_its_messages():
    for share, wanted in ((1.0, "ring"), (0.5, "doubling")):
        assert choose("auto", 300 << 10, 2, False, False, True, wire_share=share) == wanted


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "windows"])
def test_what_is_asked_for_is_taken(algorithm):
    assert choose(algorithm, 100, 8, True, False) == algorithm


def test_what_cannot_be_is_refused():
    with pytest.raises(
        ValueError,
        match="algorithm='windows': the ranks share no memory, or unequally",
    ):
        choose("windows", 100, 8, False, False)
    with pytest.raises(ValueError, match="algorithm='doubling': 1073741825 bytes in one message are too many"):
        choose("doubling", (1 << 30) + 1, 8, True, True)
    with pytest.raises(ValueError, match="algorithm='best': it is auto, ring, doubling, windows"):
        choose("best", 100, 8, True, True)


@pytest.mark.parametrize(
    "names, nodes", [([7], [[0]]), ([5, 5, 1, 1], [[0, 1], [2, 3]]), ([2, 1, 2, 3], [[0, 2], [1], [3]])]
)
def test_nodes_are_found_by_their_names(names, nodes):
    assert nodes_of(names) == nodes
