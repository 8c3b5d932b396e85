"""Whatever ends one rank ends the job, at once and with that rank's own words."""

import sys
import time

import pytest

from tests.harness.launch import ROOT, mpirun, run_mpi, vendor

SCRIPT = ROOT / "tests/failing/faults.py"
TINY = ["--steps", "5", "--task-option", "layers=1", "--task-option", "width=8", "--task-option", "context=8"]
ASYNCHRONOUS = ("--stages", "3", "--schedule", "1f1b-async")
INTERLEAVED = ("--stages", "3", "--schedule", "1f1b-interleaved", "--num-microbatches", "3")
ZERO_BUBBLE = ("--stages", "3", "--schedule", "zb-h1")
SECONDS = 5  # the promise


def launch(fault, rank, tmp_path, *flags, n=3):
    moment = tmp_path / "moment"
    result = run_mpi(
        n, [sys.executable, SCRIPT, fault, rank, *flags], timeout=60, cwd=tmp_path, env={"FAULT_TIME": moment}
    )
    if moment.exists():
        assert time.time() - float(moment.read_text()) < SECONDS + 1, result  # one more for the harness to look around
    return result


@pytest.mark.parametrize(
    "fault, code, words",
    [
        ("raise", 1, "ValueError: boom"),
        ("exit-3", 3, "SystemExit: 3"),
        ("exit-0", 1, "SystemExit: 0"),
        ("exit-text", 1, "SystemExit: these are my last words"),
        ("interrupt", 130, "KeyboardInterrupt"),
        ("live-thread", 1, "ValueError: boom"),
        ("in-a-thread", 1, "ValueError: boom"),
        ("memory", 1, "MemoryError: no memory left"),
        ("import", 1, "ModuleNotFoundError: No module named 'a_module_that_is_not_installed'"),
    ],
)
def test_what_ends_one_rank_ends_the_job_with_its_traceback(fault, code, words, tmp_path):
    result = launch(fault, 1, tmp_path)
    assert result.returncode == code, result
    assert "Traceback (most recent call last)" in result.stderr, result
    assert words in result.stderr, result


@pytest.mark.parametrize("rank", (0, 2))
def test_the_first_and_the_last_rank_are_no_exception(rank, tmp_path):
    result = launch("raise", rank, tmp_path)
    assert result.returncode == 1 and "ValueError: boom" in result.stderr, result


@pytest.mark.parametrize("fault", ("full-stderr", "interrupted-twice"))
def test_nothing_on_the_way_to_the_end_keeps_the_others_waiting(fault, tmp_path):
    assert launch(fault, 1, tmp_path).returncode not in (0, None)


def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    result = launch("kill", 1, tmp_path)
    assert result.returncode not in (0, None), result


def test_an_exception_in_a_training_step_names_its_rank_on_every_line(tmp_path):
    result = launch("step", 1, tmp_path, *TINY)
    assert result.returncode == 1, result
    lines = result.stderr.splitlines()
    assert "[rank 1] ValueError: boom" in lines, result
    told = [line for line in lines if "faults.py" in line or "passes.py" in line]
    assert told and all(line.startswith("[rank 1] ") for line in told), result
    (log,) = tmp_path.glob("runs/*/logs/rank-0001.log")
    assert "[rank 1] ValueError: boom" in log.read_text()
    names = sorted(path.name for path in log.parent.iterdir())
    assert names == ["rank-0001.log", "ranks.txt"], "only who had something to say"


@pytest.mark.wide_if(case=lambda flags: flags in (("--stages", "3"), INTERLEAVED, ZERO_BUBBLE))
@pytest.mark.parametrize("flags", [("--servers", "1"), ("--stages", "3"), ASYNCHRONOUS, INTERLEAVED, ZERO_BUBBLE])
def test_an_exception_ends_every_kind_of_training(flags, tmp_path):
    result = launch("step", 1, tmp_path, *TINY, "--task-option", "layers=4", *flags)
    assert result.returncode == 1 and "[rank 1] ValueError: boom" in result.stderr.splitlines(), result


@pytest.mark.parametrize("module, words", [("torch", "torch is broken on this node"), ("mpi4py", "cannot start MPI")])
def test_an_import_that_fails_on_one_rank_ends_the_job(module, words, tmp_path):
    """mpi4py: before MPI_Init, where the others wait for a rank that never comes."""
    result = launch(f"no-{module}", 1, tmp_path, *TINY)
    assert result.returncode not in (0, None), result
    assert words in result.stderr and "[rank 1]" in result.stderr, result


def test_a_thread_that_still_runs_does_not_keep_a_finished_job(tmp_path):
    result = launch("end-with-thread", 1, tmp_path)
    assert result.returncode == 0, result
    assert "left without waiting for threads: helper-thread" in result.stderr


def test_threads_at_work_do_not_spoil_the_end(tmp_path):
    assert [launch("end-at-work", 1, tmp_path).returncode for _ in range(3)] == [0] * 3


def test_a_thread_may_end_by_sys_exit(tmp_path):
    result = launch("end-of-thread", 1, tmp_path)
    assert result.returncode == 0 and not result.stderr, result


@pytest.mark.wide_if(case=lambda code, times: times > 1)
@pytest.mark.parametrize("times", (1, 3))
@pytest.mark.parametrize("code", (0, 2, 75))
def test_an_agreed_end_gives_the_agreed_code_and_no_words(code, times, tmp_path):
    """Several times: a rank that leaves before MPI is done with it makes the launcher kill another, now and then."""
    results = [launch(f"end-code-{code}", 0, tmp_path, n=4) for _ in range(times)]
    assert [result.returncode for result in results] == [code] * times
    if vendor(mpirun()[0]) == "MPICH":  # Open MPI's mpirun has a word on each code but 0
        assert {result.stderr for result in results} == {""}
