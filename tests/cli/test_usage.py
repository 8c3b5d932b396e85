"""Mistakes: one line that names the flag or file and what would work, exit code 2, whatever the number of ranks.

Nothing here may import torch: a mistake is found before.
"""

import sys

import pytest

from tests.cli.test_train import MODULE, forbid
from tests.harness.launch import run_mpi, run_python


@pytest.fixture
def env(tmp_path):
    return forbid(tmp_path, "torch")


def say(n, env, *argv, cwd=None):
    """What a failing command says on standard error, without MPICH's own line about an agreed end."""
    start = [sys.executable, *MODULE, *argv]
    result = (
        run_mpi(n, start, timeout=60, env=env, cwd=cwd) if n else run_python(*start[1:], timeout=30, env=env, cwd=cwd)
    )
    assert result.returncode == 2, result
    assert not result.stdout, result
    return [line for line in result.stderr.splitlines() if "hpctrain" in line]


def test_eight_ranks_with_a_wrong_flag_print_one_line(env):
    assert say(8, env, "--stepz", "3") == ["[rank 0] hpctrain: --stepz: no such flag; did you mean --steps?"]


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--steps", "many"], "--steps: expected a whole number >= 1, got 'many'"),
        (["--task-option", "layers=0"], "--task-option layers=0: should be at least 1"),
        (["--config", "nowhere.toml"], "--config nowhere.toml: No such file or directory"),
        (
            ["extra"],
            "extra: no such command; there are train, evaluate, export, report, plan, profile, tune, submit, launch,"
            " files, doctor",
        ),
    ],
)
def test_a_mistake_is_one_line(argv, line, env):
    assert say(0, env, *argv) == [f"hpctrain: {line}"]


def test_a_run_folder_that_exists_is_left_alone(env, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "treasure").write_text("gold")
    assert say(2, env, "--run-dir", taken) == [
        f"[rank 0] hpctrain: --run-dir {taken}: exists already; name a new folder"
    ]
    assert [path.name for path in taken.iterdir()] == ["treasure"]
    below_a_file = taken / "treasure" / "run"
    assert say(0, env, "--run-dir", below_a_file) == [f"hpctrain: --run-dir {below_a_file}: Not a directory"]


@pytest.mark.parametrize("content", (None, b"", b"too short", b"\0\1binary" * 5000))
def test_data_that_cannot_be_used_is_one_line_and_leaves_no_folder(content, env, tmp_path):
    data = tmp_path / "data.txt"
    if content is not None:
        data.write_bytes(content)
    (line,) = say(2, env, "--data", data, cwd=tmp_path)
    assert line.startswith(f"[rank 0] hpctrain: --data {data}: "), line
    assert not (tmp_path / "runs").exists()


def test_an_option_without_effect_says_so(tmp_path):
    """And the run goes on: this one ends at the next thing it needs."""
    flags = ["--momentum", "0.5", "--threads", "9999", "--run-dir", tmp_path / "run"]
    result = run_python(*MODULE, *flags, timeout=30, env=forbid(tmp_path, "torch"))
    assert "note: --momentum has no effect with --optimizer adamw" in result.stderr, result
    assert "note: 9999 threads a rank (--threads, OMP_NUM_THREADS), and cores for " in result.stderr, result


@pytest.mark.parametrize(
    "variables, both",
    [
        ({"SLURM_STEP_NUM_TASKS": 4, "SLURM_PROCID": 2}, ("started 4 ranks (SLURM_STEP_NUM_TASKS)", "world has 1")),
        ({"SLURM_NTASKS": 4, "SLURM_PROCID": 2}, ("started 4 ranks (SLURM_NTASKS)", "world has 1")),
        ({"OMPI_COMM_WORLD_SIZE": 3, "OMPI_COMM_WORLD_RANK": 1}, ("mpirun of Open MPI started 3 ranks", "mpirun of")),
    ],
)
def test_copies_of_a_world_of_one_are_refused_with_both_numbers_and_the_cure(variables, both, env):
    result = run_python(*MODULE, timeout=30, env={**env, **variables})
    assert result.returncode == 1, result
    (line,) = result.stderr.splitlines()
    assert all(part in line for part in both) and "or set HPCTRAIN_MPI=" in line, result


@pytest.mark.parametrize(
    "variables", ({"SLURM_NTASKS": 4, "SLURM_PROCID": 0}, {"SLURM_STEP_NUM_TASKS": 1, "SLURM_PROCID": 0})
)
def test_a_batch_shell_and_a_step_of_one_task_are_one_process(variables, env):
    assert say(0, {**env, **variables}, "--steps", "0") == ["hpctrain: --steps: expected a whole number >= 1, got 0"]


def test_a_switch_that_is_neither_0_nor_1_is_refused(env):
    result = run_python(*MODULE, timeout=30, env={**env, "HPCTRAIN_MPI": "yes"})
    assert result.returncode == 1 and "HPCTRAIN_MPI=yes: it is 0" in result.stderr, result


def test_the_switch_makes_separate_copies_on_purpose(env):
    said = say(0, {**env, "SLURM_STEP_NUM_TASKS": 4, "SLURM_PROCID": 2, "HPCTRAIN_MPI": "0"}, "--steps", "0")
    assert said == ["hpctrain: --steps: expected a whole number >= 1, got 0"]


def test_where_mpi_ends_with_a_lost_rank_to_go_on_without_it_is_refused(env, tmp_path):
    (line,) = say(2, env, "--on-rank-loss", "continue", "--run-dir", tmp_path / "run")
    assert line.startswith("[rank 0] hpctrain: --on-rank-loss continue: needs ") and "mpirun --with-ft ulfm" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("other", (["--stages", "2"], ["--shard-optimizer"], ["--allreduce", "windows"]))
def test_what_a_lost_rank_takes_along_is_refused(env, other):
    (line,) = say(0, env, "--on-rank-loss", "continue", *other)
    assert line.startswith("hpctrain: --on-rank-loss continue: ") and f"leave {' '.join(other)} out" in line
