"""A link that is cut for a while does no harm; a host that is gone is noticed, and named."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.harness.launch import environment, run_mpi
from tests.harness.leftovers import end_processes, new_mark
from tests.hosts.emulated import hosts

TASK = ("--task-option", "layers=2", "--task-option", "width=16", "--task-option", "context=16", "--eval-batches", "1")
HOW = ("-m", "hpctrain", *TASK, "--allreduce", "ring", "--threads", "1")
LONG = 240  # seconds in which anything that is to happen has happened
CUT_SECONDS = 5


@pytest.fixture
def three():
    with hosts(3) as cluster:
        yield cluster


def started(cluster, output, *flags) -> tuple[subprocess.Popen, str]:
    """A training on one rank of each host, and the mark of its processes."""
    mark = new_mark()
    with output.open("wb") as file:
        command = cluster.command(1, [sys.executable, *HOW, *flags])
        how = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "start_new_session": True}
        return subprocess.Popen(command, env=environment(cluster.environment, mark), **how), mark


def wait_for(what, process) -> None:
    deadline = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < deadline and process.poll() is None, "it did not come to it"
        time.sleep(0.05)


def num_lines(file) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_link_that_is_cut_for_a_while_changes_nothing(three, tmp_path):
    flags = ("--steps", "60")
    process, mark = started(three, tmp_path / "output", *flags, "--run-dir", tmp_path / "cut")
    try:
        wait_for(lambda: num_lines(tmp_path / "cut" / "metrics.jsonl") >= 5, process)
        three.cut("host3")
        time.sleep(CUT_SECONDS)
        before = num_lines(tmp_path / "cut" / "metrics.jsonl")
        three.heal("host3")
        assert process.wait(LONG) == 0, (tmp_path / "output").read_text()
    finally:
        end_processes(mark, 0)
    assert before < 60, "it was cut before the end"
    result = run_mpi(3, [sys.executable, *HOW, *flags, "--run-dir", tmp_path / "whole"], timeout=LONG)
    assert result.returncode == 0, result
    cut, whole = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("cut", "whole"))
    assert cut["done"] and cut["weights_sha256"] == whole["weights_sha256"]


def test_a_host_that_is_gone_is_named_and_the_ranks_that_are_left_end(three, tmp_path):
    """Its launcher may wait for it for ever: no exit code is asked for, but that there is no `done`."""
    flags = ("--steps", "100000", "--checkpoint-every", "2", "--stall-seconds", "3", "--run-dir", tmp_path / "run")
    process, mark = started(three, tmp_path / "output", *flags)
    try:
        wait_for(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") >= 5, process)
        three.freeze("host3")
        deadline = time.monotonic() + LONG
        while "likely culprit: " not in (told := (tmp_path / "output").read_text()):
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        end_processes(mark, 0)
    assert "rank 2: has written nothing; stopped or lost?" in told and "likely culprit: rank 2\n" in told
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
