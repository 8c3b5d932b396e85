"""`hpctrain launch` with the real mpirun: a run that loses a rank, or is told to leave, ends as one left alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.harness.launch import launcher_env, mpirun, run_python
from tests.harness.leftovers import MARK, end_processes, new_mark

TASK = '''
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.environment import announced
from hpctrain.tasks.text import Text

STEPS = []


@dataclass(frozen=True)
class Fragile(Text):
    """Rank 1 kills itself in its 13th step, once."""

    num_layers: int = 1
    width: int = 8
    context: int = 8

    def loss(self, outputs, targets):
        STEPS.append(outputs)
        if announced(os.environ).rank == 1 and len(STEPS) == 13 and not Path("killed").exists():
            Path("killed").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(outputs, targets)
'''
FLAGS = ["--task", "fragile.py:Fragile", "--checkpoint-every", "5", "--eval-batches", "1"]
STEPS = ["--steps", "20"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "fragile.py").write_text(TASK)
    return tmp_path


def command(name: str, *flags) -> list[str]:
    return [
        "-m",
        "hpctrain",
        "launch",
        "-n",
        "2",
        "--mpirun",
        " ".join(mpirun()),
        "--",
        *FLAGS,
        *flags,
        "--run-dir",
        name,
    ]


def summary(folder, name: str) -> dict:
    return json.loads((folder / name / "summary.json").read_text())


def weights(folder) -> str:
    """Of a run that nothing happens to."""
    (folder / "killed").touch()
    result = run_python(*command("undisturbed", *STEPS), timeout=120, cwd=folder, env=launcher_env())
    assert result.returncode == 0 and "restart" not in result.stderr, result
    return summary(folder, "undisturbed")["weights_sha256"]


def test_a_run_that_loses_a_rank_goes_on_and_ends_with_the_same_weights(folder):
    result = run_python(*command("run", *STEPS), timeout=180, cwd=folder, env=launcher_env())
    assert result.returncode == 0, result
    (line,) = [line for line in result.stderr.splitlines() if "hpctrain launch: " in line]
    assert line.startswith("hpctrain launch: restart 1 of 3: mpirun ended with exit code "), result
    assert line.endswith("; goes on from step 10"), result
    ranks = (folder / "run/logs/ranks.txt").read_text().splitlines()
    assert [line for line in ranks if f" {(folder / 'killed').read_text()} on " in line][0].startswith(
        "rank 1: process"
    )
    assert len(ranks) == 2 * (1 + 2), "of each launch"
    told = summary(folder, "run")
    assert told["done"] and told["resumed_from"] == 10 and told["weights_sha256"] == weights(folder)


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_run_that_is_told_to_leave_saves_and_goes_on_when_started_again(folder, number):
    (folder / "killed").touch()
    mark = new_mark()
    env = {**os.environ, **launcher_env(), MARK: mark}
    start = {"cwd": folder, "env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    start["preexec_fn"] = lambda: signal.signal(number, signal.SIG_DFL)  # where tests run in the background of a shell
    long = [sys.executable, *command("run", "--steps", "100000")]
    with subprocess.Popen(long, **start) as process:
        try:
            deadline = time.monotonic() + 60
            while not (folder / "run/checkpoints/latest").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            left = end_processes(mark, 5)
    assert process.returncode == 75 and "asked to leave: mpirun ended with exit code 75, saved on request" in err, err
    assert not left
    step = int((folder / "run/checkpoints/latest").read_text().removeprefix("step-"))
    result = run_python(*command("run", "--steps", step + 3), timeout=120, cwd=folder, env=launcher_env())
    assert result.returncode == 0 and summary(folder, "run")["resumed_from"] == step, result
