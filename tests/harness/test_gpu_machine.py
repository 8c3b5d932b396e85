"""What make gpu-test does before a GPU is asked: it says what is missing, and compares losses as it says it does."""

import math

import pytest

from hpctrain.config import parse
from tests.gpu.launched import remembered
from tests.gpu.machine import missing
from tests.gpu.runs import FIRST, LATER, MIXED, RUNS, SCHEDULES, faults
from tests.harness.launch import ROOT, run_python

THERE = {"devices": lambda: (["GPU-a"], None), "cuda_of_torch": lambda: "13.0", "spec": lambda name: name}


@pytest.mark.parametrize(
    "lacks, words",
    [
        ({"devices": lambda: ([], "no CUDA driver (libcuda.so.1)")}, "no CUDA device: no CUDA driver (libcuda.so.1)"),
        ({"cuda_of_torch": lambda: None}, "no torch that was built with CUDA"),
        ({"spec": lambda name: None if name == "cupy" else name}, "no CuPy (cupy-cuda12x)"),
        ({"spec": lambda name: None if name in ("tomli_w", "mpi4py") else name}, "no mpi4py, tomli-w"),
        ({}, None),
    ],
)
def test_what_is_missing_is_one_line(lacks, words):
    assert missing(**{**THERE, **lacks}) == words


def test_without_a_device_make_gpu_test_says_so_and_nothing_is_collected():
    line = missing()
    if line is None:
        pytest.skip("this machine has a GPU")
    told = run_python("-m", "tests.gpu.machine", timeout=60)
    assert (told.returncode, told.stderr) == (1, f"the tests on a GPU cannot run: {line}\n"), told
    collected = run_python("-m", "pytest", "-q", "--collect-only", "tests/gpu", timeout=60)
    assert collected.returncode == 5 and "no tests" in collected.stdout, collected
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.index("-m tests.gpu.machine") < makefile.index("tests/suite.py --parts gpu")


@pytest.mark.parametrize(
    "name, step, off, is_fault",
    [
        ("replicas", 1, 0.9 * FIRST, False),
        ("replicas", 1, 1.1 * FIRST, True),
        ("replicas", 2, 0.9 * LATER, False),
        ("replicas", 2, -1.1 * LATER, True),
        ("1f1b-async", 1, 0.9 * LATER, False),
        ("1f1b-bf16", 2, 0.9 * MIXED, False),
        ("1f1b-bf16", 1, 1.1 * MIXED, True),
        ("replicas", 2, math.nan, True),
    ],
)
def test_losses_are_compared_by_step(name, step, off, is_fault):
    found = [3.0, 2.0]
    found[step - 1] *= 1 + off
    told = faults([3.0, 2.0], found, name)
    assert len(told) == is_fault and all(line.startswith(f"step {step}: loss ") for line in told)


def test_missing_steps_are_a_fault():
    assert faults([3.0, 2.0], [3.0], "replicas") == ["1 steps instead of 2"]
    assert faults([], [], "replicas") == ["0 steps instead of 0"]


def test_every_way_to_train_is_among_the_runs():
    for ranks, runs in RUNS.items():
        for flags in runs.values():
            parse(flags)
            assert "--servers" not in flags or ranks > int(flags[flags.index("--servers") + 1])
    assert set(SCHEDULES) <= RUNS[2].keys() and {1, 2, 8} == RUNS.keys()


def test_a_launch_and_its_failure_are_made_once():
    made = []

    @remembered
    def launch(ranks):
        made.append(ranks)
        return 10 // ranks

    assert [launch(2), launch(2)] == [5, 5]
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"the launch of \(0,\) failed: .* by zero"):
            launch(0)
    assert made == [2, 0]
