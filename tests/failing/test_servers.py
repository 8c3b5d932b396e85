"""A worker or a server that dies ends the job: at once, never with exit code 0, whatever was under way."""

import sys
import time

import pytest

from tests.harness.launch import ROOT, run_mpi

SECONDS = 10  # the promise


@pytest.mark.wide_if(case=lambda fault, rank, number: (fault, rank) in (("kill", 0), ("raise", 2)))
@pytest.mark.parametrize(
    "fault, rank, number",
    [("kill", 0, 3), ("kill", 1, 17), ("kill", 2, 8), ("raise", 1, 5), ("raise", 2, 11), ("babble", 1, 4)]
    + [("leave", 1, 3), ("differ", 1, 0)],
    ids=["worker 0", "a worker", "the server", "a worker raises", "the server raises", "a worker that MPI loses"]
    + ["a worker that forgets done", "a worker with other settings"],
)
def test_whoever_dies_ends_the_job(fault, rank, number, tmp_path):
    moment = tmp_path / "moment"
    argv = [sys.executable, ROOT / "tests/failing/served.py", fault, rank, number]
    result = run_mpi(3, argv, timeout=90, cwd=tmp_path, env={"FAULT_TIME": moment})
    assert result.returncode not in (0, None), result
    assert time.time() - float(moment.read_text()) < SECONDS, result
    if fault == "raise":
        assert "ValueError: boom" in result.stderr and f"rank {rank} of 3 failed" in result.stderr, result
    if (fault, rank) == ("raise", 1):
        assert f"worker 1 (rank 1) was at clock {number}, its last word was of table rows" in result.stderr, result
    if fault == "leave":
        assert "worker 1 (rank 1) ends without done()" in result.stderr, result
    if fault == "differ":
        assert "worker 1 has other lr than worker 0: 0.5, there 1e-06" in result.stderr, result
    if fault == "babble":
        words = f"server 0 lost worker 1 (rank 1) at clock {number}, its last word was of table rows: "
        assert words in result.stderr, result
