"""Hosts are hosts, and a sum over them sends what theory says."""

import json
import sys

import pytest

from tests.harness.launch import ROOT

MIB = 1 << 20
HERE = ROOT / "tests/hosts"
# ranks on each of four hosts, algorithm, and how many share the array on its way over the network
SENT = [(1, "ring", 4), (2, "ring", 8), (2, "windows", 4)]


def test_ranks_see_the_hosts_they_are_on(four):
    result = four.run_mpi(2, [sys.executable, HERE / "seen.py"], timeout=60)
    assert result.returncode == 0, result
    assert json.loads(result.stdout) == [[name, 2] for name in four.names for _ in range(2)]


@pytest.mark.parametrize("per_host, algorithm, num_shares", SENT)
def test_an_all_reduce_sends_what_theory_says(four, per_host, algorithm, num_shares):
    """Each host 2 (n - 1) / n of the array; no algorithm can do with less than n = 4, the number of hosts."""
    result = four.run_mpi(per_host, [sys.executable, HERE / "sent.py", algorithm, 64 * MIB], timeout=180)
    assert result.returncode == 0, result
    told = json.loads(result.stdout)
    assert told["wrong"] == 0
    expected = 2 * (num_shares - 1) / num_shares * 64 * MIB
    assert told["sent"] == {name: pytest.approx(expected, rel=0.01) for name in four.names}
