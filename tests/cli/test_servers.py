"""Parameter servers as a user starts them: what the summary says, that gathered rounds are the ring, and mistakes."""

import json
import sys

import pytest

from tests.cli.several import several
from tests.cli.test_train import KINDS, MODULE, check_schema, train, train_here
from tests.harness.launch import ROOT, run_mpi

TASK = ["--task", "ratings", "--batch-size", "40", "--eval-batches", "2"]
DOUBLE = [*TASK, "--precision", "float64", "--optimizer", "adagrad", "--steps", "8"]
NO_TABLES = f"{ROOT}/tests/cli/noisy.py:Noisy"
SERVED = {
    "baseline": {"rmse": float, "hit_rate_at_10": float},
    "eval": {"rmse": float, "hit_rate_at_10": float},
    "allreduce": type(None),
    "staleness": {
        "bound": (int, str),
        "max_clock_gap": int,
        "histogram": dict,
        "lags": dict,
        "waiting_share": [float],
    },
    "servers": [
        {
            "requests": int,
            "requests_per_second": float,
            "peak_queue": int,
            "busy_share": float,
            "updates": int,
            "rows": dict,
        }
    ],
}


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """3 workers and 2 servers, in rounds."""
    folder = tmp_path_factory.mktemp("runs") / "gathered"
    return folder, *train(5, folder, *DOUBLE, "--servers", "2", "--eval-every", "4")


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """3 workers, at most 3 rounds apart, one of them slow at random."""
    folder = tmp_path_factory.mktemp("runs") / "bounded"
    flags = ["--servers", "1", "--staleness", "3", "--straggler", "any:3:0.3", "--record-log", "--steps", "30"]
    return folder, *train(4, folder, *TASK, *flags)


def test_rounds_train_what_one_process_trains(gathered, tmp_path):
    _, summary, _ = gathered
    one = train_here(tmp_path / "one", *DOUBLE)
    for key in ("first_loss", "final_loss"):
        assert summary[key] == pytest.approx(one[key], rel=1e-10)
    assert summary["eval"] == {name: pytest.approx(value, rel=1e-8) for name, value in one["eval"].items()}
    assert summary["baseline"] == one["baseline"] and summary["eval"]["rmse"] < 1.5


def test_the_summary_says_what_servers_did(gathered):
    folder, summary, result = gathered
    check_schema(summary, {**KINDS, **SERVED})
    assert summary["layout"] == {"stages": 1, "replicas": 3, "servers": 2, "ranks": 5}
    assert summary["staleness"]["max_clock_gap"] == 0 and [each["updates"] for each in summary["servers"]] == [8, 8]
    assert len(summary["bytes_sent_per_rank"]) == 5 and all(size > 0 for size in summary["bytes_sent_per_rank"])
    assert "ratings: 5 ranks with 1 thread each, 2 of them serve; files go to" in result.stdout
    assert "5: 1 stage x 3 replicas, 2 servers" in result.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval" not in line] == list(range(1, 9))
    assert all(line["items"] == 40 for line in lines if "eval" not in line)


def test_the_bound_holds_and_the_log_has_everything(bounded):
    folder, summary, _ = bounded
    staleness = summary["staleness"]
    assert staleness["bound"] == 3 and 0 <= staleness["max_clock_gap"] <= 3
    events = [json.loads(line) for line in (folder / "server-0.jsonl").read_text().splitlines()]
    applied = [event for event in events if event["do"] == "apply"]
    assert sorted((event["workers"][0], event["clock"]) for event in applied) == [
        (worker, clock) for worker in range(3) for clock in range(30)
    ]
    assert summary["servers"][0]["updates"] == 90 == sum(staleness["lags"].values())
    assert max(event["lag"] for event in applied) <= (2 * 3 + 1) * 2
    assert all(event["gap"] <= 3 for event in events if event["do"] == "pull")


def test_its_weights_are_those_of_plain_embeddings(bounded, capsys):
    from safetensors.torch import load_file

    from hpctrain import cli

    folder, summary, _ = bounded
    weights = load_file(folder / "model.safetensors")
    assert weights["layers.0.users.weight"].shape == (671, 16)
    assert cli.main(["evaluate", str(folder), "--batches", "2"], None) == 0
    assert f"rmse {summary['eval']['rmse']:.6g}" in capsys.readouterr().out
    assert cli.main(["evaluate", str(folder), "--split", "all", "--batches", "4"], None) == 0


MISTAKES = {
    "--servers 3": "--servers 3: 3 ranks leave none to train; start more, as mpirun -n 8",
    "--staleness 3": "--staleness 3: needs --servers, as in --servers 1",
    "--servers 1 --aggregate no.py:own": "no.py:own: no such file",
    "--servers 1 --task NO_TABLES --dense-via ring": "--dense-via ring: the task has no tables()",
}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes") / "all"
    flags = [*TASK, "--steps", "3", "--run-dir", folder / "run"]
    words = {mistake: [NO_TABLES if word == "NO_TABLES" else word for word in mistake.split()] for mistake in MISTAKES}
    return several(3, folder, {mistake: [*flags, *words[mistake]] for mistake in MISTAKES})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistakes, mistake):
    check_told(mistakes[mistake], MISTAKES[mistake])


def test_a_table_that_grows_past_its_limit_ends_all_ranks_by_one_line(tmp_path):
    flags = [*TASK, "--steps", "3", "--run-dir", tmp_path / "run", "--servers", "1", "--max-table-rows", "5"]
    check_told(run_mpi(2, [sys.executable, *MODULE, *flags], timeout=60), "server 0: worker ")


def check_told(result, line):
    told = [each for each in result.stderr.splitlines() if "hpctrain:" in each]
    assert result.returncode in (1, 2) and told and line in told[0], result
    assert "Traceback" not in result.stderr, result
