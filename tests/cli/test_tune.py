"""tune from end to end: a file that train takes on the same ranks, and one line where either cannot be."""

import json
import sys

import pytest

from hpctrain.comm.tuning import read_tuning
from hpctrain.config import read_toml
from tests.cli.test_train import MODULE, TINY, forbid, train
from tests.harness.launch import run_mpi
from tests.plan.test_tuning import WHOLE


def test_what_tune_writes_train_takes_on_the_same_ranks(tmp_path):
    out, flags = tmp_path / "tuning.json", ["--max-bytes", "16384", "--repeats", "1"]
    told = run_mpi(2, [sys.executable, *MODULE, "tune", "--out", out, *flags], timeout=120)
    assert told.returncode == 0 and not told.stderr.strip(), told
    assert told.stdout.splitlines()[-1] == f"to train by these: --tuning {out}"
    assert [path.name for path in tmp_path.iterdir()] == ["tuning.json"]
    constants = vars(read_tuning(out).constants)
    summary, result = train(2, tmp_path / "run", *TINY, "--tuning", out, "--bucket-bytes", "4096")
    assert not result.stderr.strip(), result
    assert summary["tuning"] == {**constants, "bucket_bytes": 4096}
    assert max(bucket["bytes"] for bucket in summary["allreduce"]) < 1 << 20 and len(summary["allreduce"]) > 1
    settings = read_toml(str(tmp_path / "run" / "config.toml"))
    assert settings["tuning"] == constants and settings["bucket_bytes"] == 4096


def say(n, tmp_path, *argv):
    """What a command that needs no torch says, on all ranks together."""
    result = run_mpi(n, [sys.executable, *MODULE, *argv], timeout=60, env=forbid(tmp_path, "torch"))
    assert result.returncode == 2 and not result.stdout, result
    return [line for line in result.stderr.splitlines() if "hpctrain" in line]


def test_one_rank_has_nothing_to_tune(tmp_path):
    alone = (
        "hpctrain: tune: one rank sums nothing up; start two at least: mpirun -n 2 python -m hpctrain tune --out FILE"
    )
    assert say(1, tmp_path, "tune", "--out", tmp_path / "x.json") == [alone]


def test_a_mistake_of_tune_is_one_line(tmp_path):
    assert say(3, tmp_path, "tune") == ["hpctrain: tune: name the file to write, as in: tune --out tuning.json"]


@pytest.mark.parametrize(
    "content, what",
    [
        (None, "No such file or directory; measure again: mpirun -n N python -m hpctrain tune --out FILE"),
        (
            {**WHOLE, "seconds_per_byte": float("nan")},
            "seconds_per_byte is nan; expected seconds from 1e-15 to 0.001; m",
        ),
    ],
)
def test_train_refuses_a_file_in_one_line_before_the_first_step(tmp_path, content, what):
    path = tmp_path / "tuning.json"
    if content:
        path.write_text(json.dumps(content))
    (line,) = say(3, tmp_path, "--tuning", path, "--run-dir", tmp_path / "run")
    assert line.startswith(f"[rank 0] hpctrain: --tuning {path}: {what}")
    assert not (tmp_path / "run").exists()
