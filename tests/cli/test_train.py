"""The command as a user gives it: what it prints, what it leaves, and that it says the same thing twice."""

import json
import os
import sys
from unittest.mock import patch

import pytest

from hpctrain import cli
from tests.cli.several import several
from tests.harness.launch import ROOT, run_mpi, run_python

TINY = ["--steps", "6", "--batch-size", "13", "--task-option", "layers=1", "--task-option", "width=16"]
TINY += ["--task-option", "context=16"]
MODULE = ("-m", "hpctrain")

KINDS = {  # the schema of summary.json in collective mode
    "done": bool,
    "task": str,
    "layout": {"stages": int, "replicas": int, "servers": int, "ranks": int},
    "schedule": (str, type(None)),
    "steps": int,
    "resumed_from": (int, type(None)),
    "lost_ranks": list,
    "stopped_early": bool,
    "first_loss": float,
    "final_loss": float,
    "skipped_steps": int,
    "samples_per_second": float,
    "step_seconds": float,
    "data_waiting_share": [float],
    "baseline": {"loss": float, "bits_per_byte": float},
    "eval": {"loss": float, "bits_per_byte": float},
    "bytes_sent_per_rank": [int],
    "messages_sent_per_rank": [int],
    "control_messages_per_rank": [int],
    "staged_bytes": int,
    "direct_bytes": int,
    "peak_device_bytes": [(int, type(None))],
    "allreduce": [
        {
            "algorithm": str,
            "compress": str,
            "bytes": int,
            "seconds": float,
            "bus_bandwidth": (float, type(None)),
            "hidden_share": (float, type(None)),
        }
    ],
    "tuning": (dict, type(None)),
    "checkpoints": {"saved": int, "failed": int, "bytes": (int, type(None)), "seconds": (float, type(None))},
    "stages": [{"layers": list, "parameters": int, "unsplit": list}],
    "bubble_rate": (dict, type(None)),
    "peak_in_flight": [int],
    "weight_versions": [int],
    "peak_activation_bytes": [(int, type(None))],
    "staleness": type(None),
    "servers": type(None),
    "peak_memory_bytes": [int],
    "optimizer_state_bytes": [int],
    "weights_sha256": str,
    "environment": dict,
    "trace": (dict, type(None)),
}
ENVIRONMENT = ["hpctrain", "git", "python", "torch", "numpy", "mpi4py", "mpi", "hosts", "cpu", "device"]
ENVIRONMENT += ["threads", "data_sha256"]


def check_schema(value, kind):
    if isinstance(kind, dict):
        assert list(value) == list(kind)
        for key, each in kind.items():
            check_schema(value[key], each)
    elif isinstance(kind, list):
        assert value
        for each in value:
            check_schema(each, kind[0])
    else:
        assert isinstance(value, kind), (value, kind)


def train(n, folder, *flags, **how):
    """A finished run in `folder`; returns its summary and the launch's result. n = 0: without a launcher."""
    argv = [*MODULE, "--run-dir", folder, *flags]
    result = run_mpi(n, [sys.executable, *argv], timeout=120, **how) if n else run_python(*argv, timeout=120, **how)
    assert result.returncode == 0, result
    return json.loads((folder / "summary.json").read_text()), result


def train_several(n, folder, flags_by_name):
    """As `train` with each of these flags, in one launch; what it returns, by name. `folder` is a new one."""
    commands = {name: ["--run-dir", folder / name, *flags] for name, flags in flags_by_name.items()}
    results = several(n, folder, commands)
    assert not any(result.returncode for result in results.values()), results
    return {
        name: (json.loads((folder / name / "summary.json").read_text()), result) for name, result in results.items()
    }


def train_here(folder, *flags):
    """As `train` without a launcher, in this process: torch is loaded already. Returns the summary."""
    with patch.dict(os.environ):
        assert cli.main(["--run-dir", str(folder), *map(str, flags)], None) == 0
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "eight"
    return folder, *train(8, folder, *TINY)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """By the ring; with a lower thread level, and a number of threads, in the environment."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    return folder, *train(
        2, folder, *TINY, "--allreduce", "ring", env={"MPI4PY_RC_THREAD_LEVEL": "single", "OMP_NUM_THREADS": "3"}
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One rank under mpirun, with more threads by the flag than the environment says."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, *train(1, folder, *TINY, "--threads", "3", env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def alone(one, tmp_path_factory):
    """The configuration of the one rank again, without MPI, which also means: none installed."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    without = forbid(tmp_path_factory.mktemp("without"), "mpi4py")
    return folder, *train(0, folder, "--config", one[0] / "config.toml", env=without)


def test_the_summary_keeps_its_schema(eight):
    _, summary, _ = eight
    check_schema(summary, KINDS)
    assert list(summary["environment"]) == ENVIRONMENT
    assert summary["done"] is True and summary["steps"] == 6
    assert summary["layout"] == {"stages": 1, "replicas": 8, "servers": 0, "ranks": 8}
    assert len(summary["bytes_sent_per_rank"]) == len(summary["peak_memory_bytes"]) == 8


def test_the_bytes_sent_are_those_of_the_ring(two):
    """Each rank sends a chunk 2 (n - 1) times, so all ranks together send 2 (n - 1) arenas a step."""
    _, summary, _ = two
    arena = sum(bucket["bytes"] for bucket in summary["allreduce"])
    assert sum(summary["bytes_sent_per_rank"]) == 6 * 2 * 1 * arena


def test_within_a_node_no_message_carries_gradients(eight):
    _, summary, _ = eight
    assert {bucket["algorithm"] for bucket in summary["allreduce"]} == {"windows"}
    assert sum(summary["bytes_sent_per_rank"]) == sum(summary["messages_sent_per_rank"]) == 0
    assert all(0 <= bucket["hidden_share"] <= 1 for bucket in summary["allreduce"])


def test_metrics_have_a_line_a_step(eight):
    folder, summary, _ = eight
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert lines[0]["loss"] == summary["first_loss"] and lines[-1]["loss"] == summary["final_loss"]
    assert all(line["items"] == 13 * 16 and line["skipped"] is None for line in lines)


def test_the_console_shows_progress_a_sample_the_table_and_where_the_files_lie(eight):
    folder, summary, result = eight
    assert result.stdout.splitlines()[0] == f"text: 8 ranks with 1 thread each; files go to {folder}"
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[1:7]] == [f"step {i}/6" for i in range(1, 7)]
    assert "A sample of the trained model:" in result.stdout
    assert f"baseline {summary['baseline']['bits_per_byte']:.4f}" in result.stdout
    assert result.stdout.splitlines()[-1] == f"files in {folder}"
    assert not result.stderr.strip(), result


def test_the_folder_holds_what_the_readme_says(eight):
    from safetensors.numpy import load_file

    folder, _, _ = eight
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.toml",
        "logs",
        "metrics.jsonl",
        "model.safetensors",
        "summary.json",
    ]
    assert [path.name for path in (folder / "logs").iterdir()] == ["ranks.txt"], "nobody had something to say"
    weights = load_file(folder / "model.safetensors")
    assert all(name.startswith("layers.") for name in weights)


def test_the_configuration_it_left_gives_the_same_bits_again(one, alone):
    """On more ranks test_own_task does the same."""
    assert alone[1]["weights_sha256"] == one[1]["weights_sha256"]
    assert (alone[0] / "config.toml").read_text() == (one[0] / "config.toml").read_text()


def test_one_rank_equals_no_mpi_at_all_and_eight_ranks_to_rounding(eight, one, alone):
    _, eight, _ = eight
    _, one, _ = one
    _, alone, _ = alone
    assert alone["weights_sha256"] == one["weights_sha256"]
    assert alone["environment"]["mpi"] is None and one["environment"]["mpi"] is not None
    assert alone["final_loss"] == pytest.approx(eight["final_loss"], rel=1e-4)
    assert alone["eval"]["loss"] == pytest.approx(eight["eval"]["loss"], rel=1e-4)
    assert alone["baseline"] == eight["baseline"]


def forbid(folder, *modules):
    """An environment in which importing any of `modules` fails."""
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} must not be needed')\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_help_and_version_need_neither_mpi_nor_torch_and_one_rank_answers(tmp_path):
    env = forbid(tmp_path, "mpi4py", "torch", "numpy")
    for word in ("--help", "--version"):
        alone = run_python(*MODULE, word, timeout=20, env=env)
        three = run_mpi(3, [sys.executable, *MODULE, word], timeout=60, env=env)
        assert alone.returncode == three.returncode == 0, (alone, three)
        assert alone.stdout == three.stdout and alone.stdout, three


def test_nan_ends_all_ranks_with_one_line_and_code_1(tmp_path):
    flags = ["--optimizer", "sgd", "--lr", "1e30", "--run-dir", tmp_path / "nan"]
    result = run_mpi(2, [sys.executable, *MODULE, *TINY, *flags], timeout=60)
    assert result.returncode == 1, result
    ours = [line for line in result.stderr.splitlines() if line.startswith("[rank")]
    assert ours == ["[rank 0] hpctrain: step 2: not finite: the loss on rank 0, the loss on rank 1"], result
    assert not (tmp_path / "nan" / "summary.json").exists()
    assert len((tmp_path / "nan" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_lower_thread_level_in_the_environment_is_no_hindrance(two):
    _, summary, result = two
    assert summary["done"] and "THREAD_MULTIPLE" not in result.stderr, result


def test_threads_are_those_of_the_flag_else_of_the_environment(one, two):
    for folder, summary, _ in (one, two):
        assert summary["environment"]["threads"] == 3
        assert "threads = 3\n" in (folder / "config.toml").read_text()
