"""Random all-reduces while ranks are stopped, and runs of which ranks are killed. `make soak` does it for long."""

import json

import pytest

from tests.soak import full_disk
from tests.soak.__main__ import soak
from tests.soak.full_disk import lacking
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


def test_a_full_disk_and_a_read_only_one_are_told_and_the_run_goes_on(capsys):
    """Where no small file system can be mounted, the command must say why."""
    if (why := lacking()) is not None:
        assert full_disk.main(["--faults", "1"]) == 2 and why in capsys.readouterr().err
        return
    result = full_disk.faults(10, seed=20240229)
    assert result.returncode == 0, result
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["faults"] == 10 and told["wrong"] == 0
    assert any("full" in each for each in told) and any("read-only" in each for each in told)
