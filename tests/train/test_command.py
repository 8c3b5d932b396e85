"""The command up to the first step: what is settled, what is noted, and who prepares the data."""

import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.train import command
from tests.harness.launch import ROOT

UNLESS_ASKED = "without --checkpoint-every, but when a signal has asked the run to leave"
PREPARED = f"{ROOT}/tests/train/preparing.py:Prepared"


def settled(tmp_path, *flags, num_ranks=1):
    return command.prepare(["--run-dir", str(tmp_path / "run"), *flags], num_ranks)


def test_epochs_become_steps_that_can_be_repeated(tmp_path):
    prepared = settled(
        tmp_path, "--task", PREPARED, "--task-option", f"folder={tmp_path}", "--epochs", "3", "--batch-size", "10"
    )
    assert prepared["config"]["steps"] == 12 and prepared["config"]["epochs"] is None, "37 rows are 4 batches"


def test_paths_and_options_are_settled_for_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("x" * 9000)
    prepared = settled(tmp_path, "--data", "my.txt", "--task-option", "layers=1")["config"]
    assert prepared["data"] == f"{tmp_path}/my.txt"
    assert prepared["task_option"]["layers"] == "1" and prepared["task_option"]["width"] == "64"


def test_a_dtype_to_reduce_in_is_a_compression(tmp_path):
    prepared = settled(tmp_path, "--reduce-dtype", "bfloat16")["config"]
    assert prepared["compress"] == "bf16" and prepared["reduce_dtype"] is None


@pytest.mark.parametrize(
    "flags, note",
    [
        (["--lr-min", "0.001"], "--lr-min has no effect with --lr-schedule constant"),
        (["--momentum", "0.5"], "--momentum has no effect with --optimizer adamw"),
        (["--schedule", "naive"], "--schedule has no effect with one stage"),
        (["--checkpoint-async"], f"--checkpoint-async has no effect {UNLESS_ASKED}"),
        (["--keep-checkpoints", "3"], f"--keep-checkpoints has no effect {UNLESS_ASKED}"),
        (["--stall-seconds", "5"], "--stall-seconds has no effect with one process, which waits for no other"),
        (["--steps", "5", "--lr-warmup-steps", "5"], "--lr-warmup-steps 5: the run ends before, after 5 steps"),
        (["--steps", "5", "--eval-every", "6"], "--eval-every 6: the run ends before, after 5 steps"),
    ],
)
def test_flags_without_effect_are_noted(flags, note, tmp_path, capsys):
    settled(tmp_path, *flags)
    assert capsys.readouterr().err == f"note: {note}\n"


def test_a_package_that_a_flag_needs_is_missed_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(command.util, "find_spec", lambda name: None)
    assert settled(tmp_path, "--tensorboard")["usage"] == (
        '--tensorboard: needs the package tensorboard; pip install "hpctrain[report]"'
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi(min_size=3)
def test_one_rank_of_each_other_node_prepares_and_all_wait_for_it(comm, monkeypatch, shared_tmp_path):
    """Rank 0 has prepared its own node when it read the command line."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{comm.rank // 2}")
    settings = asdict(Config(task=PREPARED, task_option={"folder": str(shared_tmp_path)}))
    with Mesh(comm) as mesh:
        assert command.prepare_nodes(settings, mesh) is None
    there = {path.name: path.read_text() for path in Path(shared_tmp_path).glob("node*")}
    assert there == {f"node{node}": "prepared\n" for node in range(1, (comm.size + 1) // 2)}


@pytest.mark.mpi(min_size=3)
def test_a_node_that_cannot_prepare_is_told_to_all_ranks(comm, monkeypatch, shared_tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{comm.rank // 2}")
    settings = asdict(Config(task=PREPARED, task_option={"folder": str(shared_tmp_path), "fails_on": "node1"}))
    with Mesh(comm) as mesh:
        assert command.prepare_nodes(settings, mesh) == "on node1: --data x: no room on the disk of node1"
