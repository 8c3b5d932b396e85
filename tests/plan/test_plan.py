"""The pure part: grid and ring over whole ranges, in one process."""

import pytest

from hpctrain.plan import ring
from hpctrain.plan.grid import RANK_ORDERS, Coordinate, Grid, split_evenly


@pytest.mark.parametrize("order", RANK_ORDERS)
def test_grid_maps_every_rank_to_one_coordinate_and_back(order):
    for stages in range(1, 7):
        for replicas in range(1, 7):
            grid = Grid(stages, replicas, order)
            coordinates = [grid.coordinate(rank) for rank in range(grid.num_ranks)]
            assert len(set(coordinates)) == stages * replicas
            assert [grid.rank(*coordinate) for coordinate in coordinates] == list(range(grid.num_ranks))


def test_replicas_of_a_stage_are_consecutive_ranks_by_default():
    assert Grid(3, 2).replicas_of(1) == [2, 3]
    assert Grid(3, 2, "stage-fastest").replicas_of(1) == [1, 4]
    assert Grid(3, 2).coordinate(5) == Coordinate(stage=2, replica=1)


def test_split_evenly_covers_everything_once_and_differs_by_at_most_one():
    for length in range(41):
        for parts in range(1, 9):
            ranges = split_evenly(length, parts)
            assert [item for piece in ranges for item in piece] == list(range(length))
            assert len(ranges) == parts
            sizes = [len(piece) for piece in ranges]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_the_picture_of_three_ranks():
    sends = [[step.send for step in ring.scatter_reduce(rank, 3) + ring.all_gather(rank, 3)] for rank in range(3)]
    assert sends == [[2, 1, 0, 2], [0, 2, 1, 0], [1, 0, 2, 1]]


def summation_order(chunk, num_ranks):
    """Ranks in the order in which their shares of a chunk are added."""
    return [(chunk + 1 + step) % num_ranks for step in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_walking_the_steps_sums_every_chunk_in_ring_order(num_ranks):
    held = [[(rank,) for _ in range(num_ranks)] for rank in range(num_ranks)]  # held[rank][chunk] = shares, in order
    for step in range(num_ranks - 1):
        moves = [ring.scatter_reduce(rank, num_ranks)[step] for rank in range(num_ranks)]
        sent = [held[rank][moves[rank].send] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            assert moves[rank].receive == moves[(rank - 1) % num_ranks].send
            held[rank][moves[rank].receive] = sent[(rank - 1) % num_ranks] + held[rank][moves[rank].receive]
    for rank in range(num_ranks):
        assert list(held[rank][rank]) == summation_order(rank, num_ranks)
    for step in range(num_ranks - 1):
        moves = [ring.all_gather(rank, num_ranks)[step] for rank in range(num_ranks)]
        sent = [held[rank][moves[rank].send] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            held[rank][moves[rank].receive] = sent[(rank - 1) % num_ranks]
    for rank in range(num_ranks):
        assert [list(shares) for shares in held[rank]] == [summation_order(c, num_ranks) for c in range(num_ranks)]


def test_every_rank_sends_the_bandwidth_optimal_number_of_chunks():
    for num_ranks in range(1, 9):
        for rank in range(num_ranks):
            for steps in (ring.scatter_reduce(rank, num_ranks), ring.all_gather(rank, num_ranks)):
                assert len({step.send for step in steps}) == len(steps) == num_ranks - 1, "each chunk once, one never"
