"""The doctor under mpirun, with the MPI library of this environment, which is not CUDA-aware."""

import sys

import pytest

from tests.cli.test_train import MODULE, forbid
from tests.harness.launch import run_mpi

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def doctor(*argv, env):
    result = run_mpi(2, [sys.executable, *MODULE, "doctor", *argv], timeout=60, env={**HIDDEN, **env})
    return result, [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_no_device_is_no_problem_and_torch_is_not_loaded(tmp_path):
    result, lines = doctor(env=forbid(tmp_path, "torch"))
    assert result.returncode == 0, result
    assert "path of gradients no device: host memory" in lines
    assert [line for line in lines if line.startswith("CUDA-aware MPI no (library: MPIX_")], result
    assert "CUDA_VISIBLE_DEVICES empty" in lines


@pytest.mark.parametrize("switch, line", [("0", "CUDA-aware MPI no (switch"), ("1", "CUDA-aware MPI yes (switch")])
def test_the_switch_counts_and_a_library_that_disagrees_is_told(switch, line):
    result, lines = doctor(env={"HPCTRAIN_CUDA_AWARE": switch})
    assert result.returncode == 0 and [each for each in lines if each.startswith(line)], result
    assert ("switch says yes (HPCTRAIN_CUDA_AWARE=1), library says no" in result.stdout) == (switch == "1"), result


def test_a_device_that_is_required_and_missing_is_one_line():
    result, lines = doctor("--require", "cuda", env={})
    assert result.returncode == 1, result
    assert len([line for line in lines if line.startswith("problem: --require cuda: rank 0 on ")]) == 1, result


def test_what_else_is_required_is_refused():
    result, _ = doctor("--require", "tpu", env={})
    assert result.returncode == 2 and "--require" in result.stderr and result.stderr.count("hpctrain") == 1, result


def test_a_proof_wants_no_mpirun():
    result, _ = doctor("--prove", env={})
    assert result.returncode == 2 and result.stderr.count("--prove: it starts two ranks of its own") == 1, result
