"""Layers to stages: the slowest stage is as fast as it can be."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.partition import partition, split_by_counts


def slowest(costs, ranges):
    return max(sum(costs[index] for index in layers) for layers in ranges)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_no_other_cut_has_a_faster_slowest_stage(costs, stages):
    stages = min(stages, len(costs))
    ranges = partition(costs, stages)
    assert [index for layers in ranges for index in layers] == list(range(len(costs)))
    assert len(ranges) == stages and all(len(layers) for layers in ranges)
    every = []
    for cut in combinations(range(1, len(costs)), stages - 1):
        borders = [0, *cut, len(costs)]
        every.append(slowest(costs, [range(a, b) for a, b in zip(borders, borders[1:])]))
    assert slowest(costs, ranges) == min(every)


def test_four_equal_layers_on_three_devices():
    assert partition([1, 1, 1, 1], 3) == [range(2), range(2, 3), range(3, 4)]


def test_a_heavy_layer_is_alone():
    assert partition([1, 1, 8, 1, 1], 3) == [range(2), range(2, 3), range(3, 5)]


def test_more_stages_than_layers_are_refused_with_the_most_that_work():
    with pytest.raises(ValueError) as caught:
        partition([1, 1, 1], 4)
    assert str(caught.value) == "--stages 4: the model has 3 layers, enough for 3 stages"


def test_an_explicit_list_is_taken_as_it_is():
    assert split_by_counts("1,2,1", 4, 3) == [range(1), range(1, 3), range(3, 4)]


@pytest.mark.parametrize(
    "text, line",
    [
        ("1,x", "--stage-split 1,x: expected the layers of each stage, one at least, such as 3,2,2,4"),
        ("0,4", "--stage-split 0,4: expected the layers of each stage, one at least, such as 3,2,2,4"),
        ("2,2", "--stage-split 2,2: 2 stages with 4 layers; there are 3 stages and 4 layers"),
        ("1,1,1", "--stage-split 1,1,1: 3 stages with 3 layers; there are 3 stages and 4 layers"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(text, line):
    with pytest.raises(ValueError) as caught:
        split_by_counts(text, 4, 3)
    assert str(caught.value) == line
