"""Random all-reduces while ranks are stopped at random: no wrong element, no hang. `make soak` does it for long."""

import pytest

from tests.soak.__main__ import soak


@pytest.mark.wide_if(case=lambda ranks: ranks == 2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_sums_are_right_while_ranks_are_stopped(ranks):
    result, stops = soak(ranks, turns=200, seed=20240229, pause=0.2)
    assert result.returncode == 0, result
    assert result.stdout.splitlines()[-1] == "200 turns, 0 faults" and stops > 0
