"""A run that stops and goes on from its checkpoint: the bits of one that never stopped; and saves that fail."""

import errno
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from hpctrain.train import checkpoint as module
from hpctrain.train import checkpoint_files as files
from hpctrain.train.checkpoint import Checkpoints
from hpctrain.train.errors import AgreedError
from tests.train.test_checkpoint_state import SAVED, prepared, train_until
from tests.train.test_equivalence import settings
from tests.train.toys import all_weights

HOW = settings("adam", 13)


def checkpoints(root, mesh, executor, trainer) -> Checkpoints:
    return Checkpoints(root, trainer.config, executor, mesh)


@pytest.mark.mpi
def test_a_run_goes_on_with_the_same_bits(comm, shared_tmp_path):
    results, folder = [], None
    for resumed in (False, True):
        mesh, executor, trainer, lines = prepared("masked", comm, "1x1", **HOW)
        saving = checkpoints(shared_tmp_path, mesh, executor, trainer)
        if resumed:
            trainer.state = saving.load(folder)
            assert trainer.state.step == SAVED
        else:
            train_until(trainer, SAVED)
            folder = saving.save(trainer.state)
            assert folder == shared_tmp_path / "step-000005"
        trainer.train()
        told = {key: value for key, value in asdict(trainer.state).items() if key not in ("step_seconds", "seconds")}
        results.append((told, all_weights(executor, mesh)))
        mesh.close()
    assert results[0][0] == results[1][0]
    assert all(torch.equal(weight, results[1][1][name]) for name, weight in results[0][1].items())


@pytest.mark.mpi
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("where", ["begin", "write_tensors", "seal"])
def test_a_save_that_fails_is_told_to_all_and_leaves_those_before_it(comm, shared_tmp_path, monkeypatch, where, fault):
    mesh, executor, trainer, _ = prepared("masked", comm, "1x1", **HOW)
    saving = checkpoints(shared_tmp_path, mesh, executor, trainer)
    train_until(trainer, 2)
    before = saving.save(trainer.state)
    train_until(trainer, 4)

    def fails(*args):
        raise OSError(fault, "it is so", "some/file")

    if mesh.rank == (mesh.size - 1 if where == "write_tensors" else 0):
        monkeypatch.setattr(files, where, fails)
    with pytest.raises(AgreedError, match="some/file: it is so"):
        saving.save(trainer.state)
    monkeypatch.undo()
    mesh.barrier()
    assert [each.name for each in files.newest_first(shared_tmp_path)] == ["step-000002"]
    assert saving.load(before).step == 2
    assert saving.save(trainer.state).name == "step-000004"
    mesh.close()


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["write_tensors", "seal"])
def test_one_in_the_background_that_fails_is_told_at_the_next(comm, shared_tmp_path, monkeypatch, capsys, where):
    mesh, executor, trainer, _ = prepared("masked", comm, "1x1", checkpoint_async=True, **HOW)
    saving = checkpoints(shared_tmp_path, mesh, executor, trainer)
    written = getattr(files, where)

    def fails(*args):
        raise OSError(errno.ENOSPC, "it is so", "some/file")

    if mesh.rank == (mesh.size - 1 if where == "write_tensors" else 0):
        monkeypatch.setattr(files, where, fails)
    for step in (2, 4, 6):
        train_until(trainer, step)
        saving.save_or_tell(trainer.state)
        if step == 4:
            saving.finish()
            monkeypatch.setattr(files, where, written)
    saving.finish()
    told = [line.partition(": ")[2].partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == (["no checkpoint of step 2", "no checkpoint of step 4"] if mesh.rank == 0 else [])
    assert saving.figures()["failed"] == 2
    mesh.barrier()
    assert [each.name for each in files.newest_first(shared_tmp_path)] == ["step-000006"]
    suffixes = sorted(path.suffix for path in (shared_tmp_path / "step-000006").iterdir())
    assert suffixes == [".json"] + [".safetensors"] * mesh.size
    mesh.close()


@pytest.mark.mpi
def test_metrics_that_are_not_finite_are_saved_and_read_again(comm, shared_tmp_path):
    mesh, executor, trainer, _ = prepared("masked", comm, "1x1", **HOW)
    saving = checkpoints(shared_tmp_path, mesh, executor, trainer)
    trainer.state.metrics = {"loss": math.inf, "rows": 4.0}
    assert saving.load(saving.save(trainer.state)).metrics == {"loss": None, "rows": 4.0}
    mesh.close()


@pytest.mark.mpi
def test_what_is_damaged_on_the_way_is_refused_by_all(comm, shared_tmp_path):
    mesh, executor, trainer, _ = prepared("masked", comm, "1x1", **HOW)
    saving = checkpoints(shared_tmp_path, mesh, executor, trainer)
    folder = saving.save(trainer.state)
    weights = all_weights(executor, mesh)
    mesh.barrier()
    last = folder / f"rank-{mesh.size - 1:04d}.safetensors"
    if mesh.rank == 0:
        content = bytearray(last.read_bytes())
        content[-1] ^= 1
        last.write_bytes(content)
    mesh.barrier()
    with pytest.raises(AgreedError, match=f"{last.name}: damaged, its sha256"):
        saving.load(folder)
    mesh.barrier()
    if mesh.rank == 0:
        (folder / "manifest.json").write_text("{}")
    mesh.barrier()
    with pytest.raises(AgreedError, match="manifest.json: no checkpoint of hpctrain"):
        saving.load(folder)
    assert all(torch.equal(weight, weights[name]) for name, weight in all_weights(executor, mesh).items())
    mesh.close()


@pytest.mark.mpi
def test_too_little_room_is_told_before_the_first_step(comm, shared_tmp_path, monkeypatch):
    mesh, executor, trainer, _ = prepared("masked", comm, "1x1", **HOW)
    saving = checkpoints(shared_tmp_path / "not" / "there", mesh, executor, trainer)
    saving.check_room()
    if mesh.rank == 0:
        monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(AgreedError, match="a checkpoint takes .* MB, 3 of them are there at a time, and 0.0 MB are"):
        saving.check_room()
    mesh.close()
