"""Pipelines as a user starts them: what the summary, the trace and the table say, and that weights are those of one."""

import json
import sys

import pytest

from hpctrain import cli
from hpctrain.plan import formulas
from hpctrain.plan.schedule import Place
from hpctrain.report.trace import bubble_rate, read_trace
from tests.cli.test_train import KINDS, MODULE, check_schema, train_here, train_several
from tests.harness.launch import run_mpi, run_python

SIZE = ["--batch-size", "24", "--task-option", "layers=4", "--task-option", "width=16", "--task-option", "context=16"]
DOUBLE = ["--steps", "4", "--precision", "float64", "--clip-norm", "0.5", *SIZE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder, summary and output of each: 2 stages x 2 replicas, traced; 4 stages without a flush."""
    hybrid = ["--stages", "2", "--num-microbatches", "4", "--trace", "--eval-every", "2", "--eval-batches", "2"]
    late = ["--stages", "4", "--schedule", "1f1b-async", "--num-microbatches", "4", "--steps", "6", "--lr", "1e-3"]
    folder = tmp_path_factory.mktemp("runs") / "both"
    trained = train_several(4, folder, {"hybrid": [*DOUBLE, *hybrid], "late": [*SIZE, *late]})
    return {name: (folder / name, *found) for name, found in trained.items()}


@pytest.fixture
def hybrid(runs):
    return runs["hybrid"]


@pytest.fixture
def late(runs):
    return runs["late"]


def test_a_hybrid_trains_what_one_process_trains(hybrid, tmp_path, capsys):
    folder, summary, _ = hybrid
    one = train_here(tmp_path / "one", *DOUBLE, "--eval-batches", "2")
    assert summary["final_loss"] == pytest.approx(one["final_loss"], rel=1e-10)
    assert summary["eval"] == {name: pytest.approx(value, rel=1e-10) for name, value in one["eval"].items()}
    assert cli.main(["evaluate", str(folder), "--batches", "2"], None) == 0
    assert f"loss {summary['eval']['loss']:.6g}" in capsys.readouterr().out


def test_the_summary_says_what_each_stage_had_and_did(hybrid):
    _, summary, result = hybrid
    check_schema(summary, KINDS)
    assert summary["layout"] == {"stages": 2, "replicas": 2, "servers": 0, "ranks": 4}
    assert (summary["schedule"], summary["peak_in_flight"], summary["weight_versions"]) == ("1f1b", [2, 1], [1, 1])
    assert [stage["layers"] for stage in summary["stages"]] == [[[0, 3]], [[4, 5]]]
    assert sum(stage["parameters"] for stage in summary["stages"]) == 256 * 16 * 2 + 16 * 16 + 4 * (12 * 256 + 64) + 32
    assert summary["bubble_rate"]["formula"] == formulas.bubble_rate("1f1b", Place(0, 2, 4)) == 0.2
    assert all(0 < summary["bubble_rate"][how] < 1 for how in ("simulated", "measured"))
    assert all(size > 0 for size in summary["peak_activation_bytes"])
    assert "schedule" in result.stdout and "bubble" in result.stdout and "4: 2 stages x 2 replicas" in result.stdout


def test_the_trace_is_one_timeline_of_all_ranks(hybrid):
    folder, summary, _ = hybrid
    traces = read_trace(folder / "trace.json")
    assert [(trace.rank, trace.stage, trace.replica) for trace in traces] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    for trace in traces:
        names = [event.name for event in trace.events if event.lane == "compute" and event.step == 1]
        assert names.count("STEP") == 1 and [n for n in names if n.startswith("B")] == ["B0", "B1", "B2", "B3"]
        assert {event.step for event in trace.events} == {1, 2, 3, 4} and trace.error < 1
        lanes = {event.lane for event in trace.events}
        assert lanes == {"compute", "waiting", "communication"}
    assert summary["trace"]["bubble_rate"] == pytest.approx(bubble_rate(traces), abs=1e-4)
    assert 0 <= summary["trace"]["hidden_share"] <= 1 and summary["trace"]["dropped_events"] == 0


def test_report_draws_it(hybrid):
    folder, _, _ = hybrid
    result = run_python(*MODULE, "report", folder, timeout=60)
    assert result.returncode == 0, result
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "1f1b" in (folder / "report.html").read_text()


def test_without_a_flush_versions_and_peaks_are_those_of_the_paper(late):
    folder, summary, _ = late
    assert summary["peak_in_flight"] == [4, 3, 2, 1] == summary["weight_versions"]
    assert summary["bubble_rate"]["formula"] == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["items"] == 24 * 16 and line["loss"] > 0 for line in lines)
    assert summary["final_loss"] < summary["first_loss"]


def test_a_layout_that_is_refused_leaves_no_folder_in_the_way_of_another_try(tmp_path):
    flags = ["--stages", "2", "--stage-split", "1,1", "--run-dir", tmp_path / "run"]
    result = run_mpi(2, [sys.executable, *MODULE, *flags], timeout=60)
    told = [line for line in result.stderr.splitlines() if "hpctrain" in line]
    assert result.returncode == 2, result
    assert told == ["[rank 0] hpctrain: --stage-split 1,1: 2 stages with 2 layers; there are 2 stages and 8 layers"]
    assert not (tmp_path / "run").exists()


def test_ranks_that_do_not_divide_are_one_line(tmp_path):
    result = run_mpi(3, [sys.executable, *MODULE, "--stages", "2", "--run-dir", tmp_path / "run"], timeout=60)
    assert result.returncode == 2, result
    told = [line for line in result.stderr.splitlines() if "hpctrain" in line]
    assert told == ["[rank 0] hpctrain: --stages 2: 3 ranks do not divide by it; 1, 3 would do"]
