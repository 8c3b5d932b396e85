"""A whole run of a task that has nothing but what every task must have, on all ranks of the launch."""

import json
import socket

import pytest
import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.train import run
from hpctrain.train.errors import AgreedError
from hpctrain.train.start import share_first
from tests.train.test_learning import Counting
from tests.train.toys import Masked, Mixing

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
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{comm.rank}")
    with Mesh(comm) as mesh:
        assert run.run_training(Config(**SETTINGS), shared_tmp_path, mesh) == 2
    expected = "hpctrain: rank 1 reads different data: 'sha256 here' on rank 0, 'sha256 there' on rank 1\n"
    assert capsys.readouterr().err == (expected if comm.rank == 0 else "")


@pytest.mark.mpi(min_size=2)
def test_one_rank_of_each_node_reads_all_data_for_their_digest(comm, monkeypatch, shared_tmp_path):
    asked = []

    class Counted(Masked):
        def data_sha256(self):
            asked.append(comm.rank)
            return "same"

    monkeypatch.setattr(run, "build_task", lambda *_: Counted())
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{comm.rank // 2}")
    with Mesh(comm) as mesh:
        assert run.run_training(Config(**SETTINGS), shared_tmp_path, mesh) == 0
    assert asked == ([comm.rank] if comm.rank % 2 == 0 else [])


@pytest.mark.mpi
@pytest.mark.parametrize("rows", (0, 1))
def test_data_sets_that_are_empty_or_of_different_lengths_are_told(comm, rows, monkeypatch, shared_tmp_path, capsys):
    class Short(Masked):
        def dataset(self, split):
            return super().dataset(split)[: rows * (9 + comm.rank)]

    monkeypatch.setattr(run, "build_task", lambda *_: Short())
    with Mesh(comm) as mesh:
        code = run.run_training(Config(**SETTINGS), shared_tmp_path, mesh)
    assert code == (2 if comm.size > 1 or not rows else 0)
    told = capsys.readouterr().err
    if comm.rank == 0 and code:
        there = "rank 1 reads different data: '9 training and 9 held-out rows' on rank 0, '10 training"
        assert (there if rows else 'dataset("train") has no rows') in told and told.count("\n") == 1


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
    assert ("replica 1 holds different weights at the end: 'layers.2.bias" in told) == (comm.rank == 0)
    assert not (shared_tmp_path / "summary.json").exists() and not (shared_tmp_path / "model.safetensors").exists()


@pytest.mark.mpi(min_size=2)
def test_buffers_that_differ_at_the_end_are_named(comm, monkeypatch, shared_tmp_path, capsys):
    """Running statistics are averaged, and not spoken of."""

    class Noting(Mixing):
        def layers(self):
            return [Counting, *super().layers()]

    monkeypatch.setattr(run, "build_task", lambda *_: Noting())
    with Mesh(comm) as mesh:
        assert run.run_training(Config(**SETTINGS), shared_tmp_path, mesh) == 0
    told = capsys.readouterr().err.splitlines()
    if comm.rank == 0:
        mixed, buffer = told
        assert mixed.startswith(
            "note: layers.1.norm mixes the rows of a micro-batch, here 1 at least: training equals one"
        )
        assert buffer == "note: buffer layers.0.seen differs between the replicas; that of replica 0 is saved"


@pytest.mark.mpi
def test_ranks_start_equal_whatever_their_buffers_are(comm):
    """Expanded ones, which nobody can write to, and dtypes that NumPy has no name for."""
    expanded, tiny = torch.zeros(1).expand(4), torch.full((3,), comm.rank + 1.0).to(torch.float8_e4m3fn)
    with Mesh(comm) as mesh:
        share_first({"mask": expanded, "tiny": tiny, "odd": torch.full((2, 3), float(comm.rank)).T}, mesh.data)
        assert tiny.float().tolist() == [1.0] * 3
        with pytest.raises(AgreedError, match="table is torch.sparse_coo and cannot travel"):
            share_first({"table": torch.zeros(3, 3).to_sparse()}, mesh.data)
