"""metrics.jsonl and summary.json: whole lines, whole files, and nothing that is not JSON."""

import json
import math
import os

import pytest

from hpctrain.report import summary
from hpctrain.report.metrics import MetricsFile, read_metrics
from hpctrain.report.summary import table_rows, write_json


def test_each_line_is_on_disk_before_the_next(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": 2.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'
    file.write({"step": 2, "loss": None})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    file.close()


def test_a_full_disk_is_told_with_the_files_name(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file._file.fileno())
    with pytest.raises(OSError, match="No space left on device: '.*/metrics.jsonl'"):
        file.write({"step": 1})
    with pytest.raises(OSError, match="No space left on device"):
        file.close()


def test_what_is_not_finite_becomes_null_at_any_depth(tmp_path):
    file = MetricsFile(tmp_path / "m")
    file.write({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": (-math.inf, "nan", True)}})
    file.close()
    assert read_metrics(tmp_path / "m") == [{"a": None, "b": [None, 1.5], "c": {"d": [None, "nan", True]}}]


@pytest.mark.parametrize("left", [b"", b'{"step": 1}\n', b'{"step": 1}\n{"step": 2, "lo', b'{"st'])
def test_a_resumed_run_appends_after_the_last_whole_line(tmp_path, left):
    path = tmp_path / "m"
    path.write_bytes(left)
    before = read_metrics(path)
    assert before == ([{"step": 1}] if b"\n" in left else [])
    file = MetricsFile(path)
    file.write({"step": 3})
    file.close()
    assert read_metrics(path) == [*before, {"step": 3}]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\nstep 2\n')
    with pytest.raises(ValueError, match=r"m, line 2: not JSON"):
        read_metrics(tmp_path / "m")


def test_write_json_replaces_the_whole_file(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"done": False, "long": "x" * 1000})
    write_json(path, {"done": True, "loss": math.nan})
    assert json.loads(path.read_text()) == {"done": True, "loss": None}
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("moment", ["dump", "rename"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, moment):
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if moment == "rename":
        monkeypatch.setattr("pathlib.Path.replace", fail)
    else:
        monkeypatch.setattr(summary.json, "dump", fail)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]


def test_the_bytes_are_on_disk_before_the_name_is(tmp_path, monkeypatch):
    path, synced = tmp_path / "summary.json", []

    def fsync(number):
        assert not path.exists()
        synced.append(os.fstat(number).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    write_json(path, {"done": True})
    assert synced == [path.stat().st_size]


def test_the_table_shows_what_there_is():
    rows = table_rows(
        {
            "layout": {"stages": 2, "replicas": 1, "servers": 1, "ranks": 3},
            "steps": 200,
            "skipped_steps": 3,
            "first_loss": 5.5,
            "final_loss": 2.25,
            "eval": {"loss": 2.0, "accuracy": 0.5, "broken": None},
            "baseline": {"loss": 2.5},
            "step_seconds": 0.0123456,
            "samples_per_second": 1234.56,
            "bytes_sent_per_rank": [1_000_000, 3_456_789],
            "peak_memory_bytes": [200_000_000, 200_000_000],
            "weights_sha256": "0123456789abcdef" * 4,
        }
    )
    assert rows == [
        ("ranks", "3: 2 stages x 1 replica, 1 server"),
        ("steps", "200 (3 skipped)"),
        ("training loss", "first 5.5000, final 2.2500"),
        ("held-out loss", "2.0000 (baseline 2.5000)"),
        ("held-out accuracy", "0.5000"),
        ("step", "0.01235 s"),
        ("speed", "1234.6 rows/s"),
        ("sent per rank", "1.0 to 3.5 MB"),
        ("memory per rank", "200.0 MB"),
        ("weights", "sha256 0123456789abcdef"),
    ]


@pytest.mark.parametrize("empty", [{}, dict.fromkeys(("layout", "steps", "eval", "baseline", "peak_memory_bytes"))])
def test_the_table_of_an_empty_summary_has_no_rows(empty):
    assert table_rows(empty) == []
