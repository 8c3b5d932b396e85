"""A job in which no rank gets on ends by itself with 76, and names the rank that it waited for."""

import re
import sys

import pytest

from tests.harness.launch import ROOT, run_mpi

TASK = f"{ROOT}/tests/failing/stuck.py:Stuck"


@pytest.mark.parametrize(
    "how, flags, says",
    [
        ("asleep", (), r"rank 1: for \d+ s in F0, step 3"),
        ("stopped", ("--servers", "1"), r"rank 1: has written nothing; stopped or lost\?"),
    ],
)
def test_a_rank_that_gets_stuck_is_named_and_all_end(tmp_path, how, flags, says):
    argv = ["-m", "hpctrain", "--task", TASK, "--task-option", f"how={how}", "--stall-seconds", "2", *flags]
    result = run_mpi(3, [sys.executable, *argv, "--run-dir", tmp_path / "run"], timeout=120)
    assert result.returncode == 76, result
    assert re.search(f"hpctrain: {says}\n", result.stderr), result
    assert "hpctrain: likely culprit: rank 1\n" in result.stderr, result
    assert re.search(r"no progress: rank 0: for \d+ s in ", result.stderr), result
    assert "Sticks" not in (tmp_path / "run" / "stall-0000.txt").read_text()
    if how == "asleep":
        assert "stuck.py" in (tmp_path / "run" / "stall-0001.txt").read_text(), "where in the program it is"
