"""A whole run of a task that has nothing but what every task must have, on all ranks of the launch."""

import json

import pytest

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.train import run
from tests.train.toys import Masked

SETTINGS = {"steps": 3, "global_batch_size": 9, "threads": 1}


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr(run, "build_task", lambda *_: Masked())


@pytest.mark.mpi
def test_a_bare_task_runs_to_its_summary(comm, task, shared_tmp_path, capsys):
    with Mesh(comm) as mesh:
        assert run.run_training(Config(**SETTINGS), shared_tmp_path, mesh) == 0
    summary = json.loads((shared_tmp_path / "summary.json").read_text())
    assert summary["done"] and summary["steps"] == 3
    assert summary["baseline"] is None and summary["environment"]["data_sha256"] is None
    assert set(summary["eval"]) == {"loss", "rows"}
    assert (shared_tmp_path / "model.safetensors").exists()
    assert bool(capsys.readouterr().out) == (comm.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_read_other_data_do_not_train(comm, monkeypatch, shared_tmp_path, capsys):
    class Local(Masked):
        def data_sha256(self):
            return "there" if comm.rank == 1 else "here"

    monkeypatch.setattr(run, "build_task", lambda *_: Local())
    with Mesh(comm) as mesh:
        assert run.run_training(Config(**SETTINGS), shared_tmp_path, mesh) == 1
    expected = "hpctrain: replica 1 reads other data: 'sha256 here' on replica 0, 'sha256 there' on replica 1\n"
    assert capsys.readouterr().err == (expected if comm.rank == 0 else "")


@pytest.mark.mpi(min_size=2)
def test_replicas_that_drifted_apart_are_found_at_the_end(comm, task, monkeypatch, shared_tmp_path, capsys):
    train = run.Trainer.train

    def drift(self):
        train(self)
        if comm.rank == 1:
            self.executor.stage.layers[2].bias.data[0] += 1e-3

    monkeypatch.setattr(run.Trainer, "train", drift)
    with Mesh(comm) as mesh:
        assert run.run_training(Config(**SETTINGS), shared_tmp_path, mesh) == 1
    told = capsys.readouterr().err
    assert ("replica 1 holds other weights at the end: 'layers.2.bias" in told) == (comm.rank == 0)
    assert not (shared_tmp_path / "summary.json").exists() and not (shared_tmp_path / "model.safetensors").exists()
