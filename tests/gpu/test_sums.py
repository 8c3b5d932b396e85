"""Sums of arrays on a device have the bits of the host, whichever way they go, and wait for who computes them."""

import json
import sys

import pytest

from tests.gpu.launched import remembered
from tests.harness.launch import ROOT, run_mpi

RACES = {2: 200, 8: 60}


@pytest.fixture(scope="session")
def summed():
    """What so many ranks told, with HPCTRAIN_CUDA_AWARE as given; a launch each."""

    @remembered
    def facts(ranks: int, aware: str) -> dict:
        command = [sys.executable, ROOT / "tests/gpu/ranks.py", RACES[ranks]]
        result = run_mpi(ranks, command, timeout=60, env={"HPCTRAIN_CUDA_AWARE": aware or None})
        assert result.returncode == 0, result
        return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))

    return facts


@pytest.mark.parametrize("ranks, aware", [(2, "0"), (2, ""), (8, "")])
def test_sums_have_the_bits_of_the_host_and_no_race_is_lost(summed, ranks, aware):
    facts = summed(ranks, aware)
    assert facts["wrong"] == [] and facts["races"] == RACES[ranks]
    assert len(facts["sha256"]) == 1, "ranks hold different bits"
    assert facts["direct_bytes"] + facts["staged_bytes"] > 0


def test_direct_sums_have_the_bits_of_staged_ones(summed):
    staged, either = summed(2, "0"), summed(2, "")
    assert staged["direct_bytes"] == 0 < staged["staged_bytes"]
    if not either["direct_bytes"]:
        pytest.skip("this MPI takes memory of the host only: `doctor` says who says so")
    assert either["staged_bytes"] == 0 and either["sha256"] == staged["sha256"]
