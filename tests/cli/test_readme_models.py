"""The programs in README run as written, and any number of ranks agrees with one."""

import re
import sys

import pytest

from tests.cli.test_train import train, train_here
from tests.harness.launch import ROOT, run_mpi
from tests.test_readme import blocks

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"Saved as `(\w+\.py)`[^\n]*\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
LIMITS = {"own_loop.py": 15, "own_task.py": 40, "gpt2.py": 40}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_examples_are_as_short_as_promised():
    counted = {name: sum(bool(line.strip()) for line in FILES[name].splitlines()) for name in LIMITS}
    assert all(counted[name] <= LIMITS[name] for name in LIMITS), counted


def test_the_own_loop_agrees_on_one_rank_and_on_three(folder):
    told = {n: run_mpi(n, [sys.executable, "own_loop.py"], timeout=120, cwd=folder) for n in (1, 3)}
    lengths = []
    for n, result in told.items():
        assert result.returncode == 0, result
        lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
        assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in range(n)], result
        assert len({line.split(": ")[1] for line in lines}) == 1, "all ranks hold the same weights"
        lengths.append(float(lines[0].rpartition(" ")[2]))
    assert lengths == pytest.approx([lengths[0]] * 2, rel=1e-4) and lengths[0] > 1


@pytest.mark.parametrize(
    "task, ranks, flags",
    [
        ("own_task.py:Tumours", 3, ("--steps", "12")),
        ("gpt2.py:GPT2", 2, ("--steps", "3", "--batch-size", "6", "--eval-batches", "1")),
    ],
)
def test_the_own_task_agrees_on_one_rank_and_on_several(folder, task, ranks, flags):
    how = ("--precision", "float64", *flags)
    several, _ = train(ranks, folder / "several", "--task", task, *how, cwd=folder)
    one = train_here(folder / "one", "--task", folder / task, *how)
    assert several["final_loss"] == pytest.approx(one["final_loss"], rel=1e-10)
    assert several["eval"] == {name: pytest.approx(value, rel=1e-8) for name, value in one["eval"].items()}
    assert one["final_loss"] < 0.95 * one["first_loss"]


def test_the_own_pipeline_gives_the_loss_of_plain_torch_on_every_rank(folder):
    result = run_mpi(4, [sys.executable, "own_pipeline.py"], timeout=120, cwd=folder)
    assert result.returncode == 0, result
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
    assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in range(4)], result
    losses = {float(line.split(": ")[1]) for line in lines}
    assert len(losses) == 1 and 0 < losses.pop() < 0.1


def test_the_own_server_ends_with_the_last_worker_and_all_hold_the_same(folder):
    result = run_mpi(4, [sys.executable, "own_server.py"], timeout=120, cwd=folder)
    assert result.returncode == 0, result
    *workers, server = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
    assert server.startswith("rank 3: 180 updates, lags "), result
    told = [re.fullmatch(rf"rank {rank}: (.*), (.*)", line).groups() for rank, line in enumerate(workers)]
    assert len(told) == 3 and len({norm for _, norm in told}) == 1, "a fresh pull sees all pushes"
    assert all(float(loss) < 0.05 for loss, _ in told)


def test_the_ring_example_sums_over_the_ranks(folder):
    result = run_mpi(3, [sys.executable, "ring.py"], timeout=60, cwd=folder)
    assert result.returncode == 0, result
    assert sorted(result.stdout.splitlines()) == ["rank 0: 3.0", "rank 1: 3.0", "rank 2: 3.0"]


def test_the_launch_lines_name_these_files():
    commands = next(block for block in blocks("README.md") if "own_loop.py" in block and "mpirun" in block)
    assert {word.partition(":")[0] for word in commands.split()} >= LIMITS.keys()
