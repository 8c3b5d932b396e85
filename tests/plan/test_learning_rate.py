"""The course of the learning rate: drawn by its values."""

import pytest

from hpctrain.plan.learning_rate import learning_rate


def course(num_steps, *args, **kwargs):
    return [round(learning_rate(step, num_steps, 1.0, *args, **kwargs), 4) for step in range(num_steps)]


def test_constant_is_the_peak_throughout():
    assert course(4) == [1.0] * 4


def test_the_warm_up_rises_in_equal_parts_to_the_peak():
    assert course(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_peak_to_the_lowest_in_the_last_step():
    assert course(5, "linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert course(7, "linear", warmup_steps=2, lowest=0.2) == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]


def test_cosine_falls_slowly_then_fast_then_slowly():
    assert course(5, "cosine") == [1.0, 0.8536, 0.5, 0.1464, 0.0]
    assert course(5, "cosine", lowest=0.5)[2] == 0.75


@pytest.mark.parametrize("schedule", ("constant", "linear", "cosine"))
@pytest.mark.parametrize("num_steps", (1, 2, 3))
@pytest.mark.parametrize("warmup_steps", (0, 1, 2, 3, 9))
def test_short_runs_stay_between_nothing_and_the_peak(schedule, num_steps, warmup_steps):
    rates = course(num_steps, schedule, warmup_steps=warmup_steps, lowest=0.1)
    assert all(0 < rate <= 1 for rate in rates)


def test_beyond_the_last_step_it_stays_at_the_lowest():
    assert learning_rate(9, 5, 1.0, "cosine", lowest=0.25) == learning_rate(4, 5, 1.0, "cosine", lowest=0.25) == 0.25
