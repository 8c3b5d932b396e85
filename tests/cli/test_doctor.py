"""The doctor under mpirun, with the MPI library of this environment; that of a wheel is not CUDA-aware."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_train import MODULE, forbid
from tests.harness.launch import is_of_wheel, run_mpi

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
ONE_HIDDEN = """
import os, sys
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.execv(sys.executable, [sys.executable, "-m", "hpctrain", "doctor", *sys.argv[1:]])
"""


@pytest.fixture
def two_devices(tmp_path):
    """An environment in which a CUDA driver shows two devices."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    source, library = Path(__file__).with_name("pretended_driver.c"), tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    return {"LD_LIBRARY_PATH": path, "CUDA_VISIBLE_DEVICES": None}


def doctor(*argv, env, n=2, program=MODULE + ("doctor",)):
    result = run_mpi(n, [sys.executable, *program, *argv], timeout=60, env={**HIDDEN, **env})
    return result, [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_no_device_is_no_problem_and_torch_is_not_loaded(tmp_path):
    result, lines = doctor(env=forbid(tmp_path, "torch"))
    assert result.returncode == 0, result
    assert "path of gradients no device: host memory" in lines
    assert not is_of_wheel() or [line for line in lines if line.startswith("CUDA-aware MPI no (library: MPIX_")], result
    assert "CUDA_VISIBLE_DEVICES empty" in lines


@pytest.mark.parametrize("switch, line", [("0", "CUDA-aware MPI no (switch"), ("1", "CUDA-aware MPI yes (switch")])
def test_the_switch_counts_and_a_library_that_disagrees_is_told(switch, line):
    result, lines = doctor(env={"HPCTRAIN_CUDA_AWARE": switch})
    assert result.returncode == 0 and [each for each in lines if each.startswith(line)], result
    disagree = "switch says yes (HPCTRAIN_CUDA_AWARE=1), library says no" in result.stdout
    assert not is_of_wheel() or disagree == (switch == "1"), result


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


def test_the_devices_of_ranks_and_who_shares_one(two_devices):
    result, lines = doctor("--servers", "1", env=two_devices, n=4)
    assert result.returncode == 0, result
    assert "CUDA devices 2 seen" in lines, result
    assert not is_of_wheel() or "path of gradients staged through pinned host memory" in lines, result
    rows = "ranks 0, 2: number 0 of 2; rank 1: number 1 of 2; rank 3: none, a server takes none"
    assert [line for line in lines if line.endswith(rows)], result
    assert [line for line in lines if "warning: " in line and "ranks 0, 2 share device GPU-64646464" in line], result


def test_a_process_that_sees_one_device_takes_number_0(two_devices):
    result, lines = doctor(env={**two_devices, "CUDA_VISIBLE_DEVICES": "1"}, n=1)
    assert [line for line in lines if line.endswith("rank 0: number 0 of 1")], result


def test_a_rank_without_a_device_beside_one_with_a_device_is_named(two_devices):
    """A driver that is missing on one node, by hiding the devices from rank 1."""
    result, lines = doctor(env=two_devices, program=("-c", ONE_HIDDEN))
    assert result.returncode == 0, result
    assert [line for line in lines if line.startswith("warning: rank 1 on ") and "sees no CUDA device" in line], result
    result, lines = doctor("--require", "cuda", env=two_devices, program=("-c", ONE_HIDDEN))
    assert result.returncode == 1, result
    assert [line for line in lines if line.startswith("problem: --require cuda: rank 0 on ")], result
