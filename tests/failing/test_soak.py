"""Random all-reduces while ranks are stopped, and runs of which ranks are killed. `make soak` does it for long."""

import pytest

from tests.soak.__main__ import soak
from tests.soak.kills import chain


@pytest.mark.wide_if(case=lambda ranks: ranks == 2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_sums_are_right_while_ranks_are_stopped(ranks):
    result, stops = soak(ranks, turns=200, seed=20240229, pause=0.2)
    assert result.returncode == 0, result
    assert result.stdout.splitlines()[-1] == "200 turns, 0 faults" and stops > 0


def test_a_run_of_which_ranks_are_killed_has_the_bits_of_one_left_alone():
    counts = chain(ranks=3, length=5, seed=20240229)
    assert counts.kills == 5 and counts.steps == sorted(counts.steps)
