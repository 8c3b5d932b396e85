"""A checkpoint on disk is whole or not there; whatever was changed in it is found before any of it is used."""

import errno
import json
import random

import pytest
import safetensors.torch
import torch

from hpctrain.train import checkpoint_files as files
from hpctrain.train.checkpoint_files import CheckpointError

NOTES = {
    "step": 40,
    "state": {"step": 40, "loss": 1.25},
    "layout": {"stages": 1},
    "config": {"seed": 0},
    "items_seen": [3],
    "contents": [],
}


def saved(root, step=40):
    part = files.begin(root, step)
    written = [
        files.write_tensors(part, f"rank-{rank:04d}.safetensors", {"weights/a": torch.arange(6.0) + rank})
        for rank in (0, 1)
    ]
    whole = files.seal(part, {**NOTES, "step": step}, written)
    files.note_latest(root, whole.name)
    return whole


def looked_at(folder):
    """All that is looked at before a tensor is used."""
    manifest = files.read_manifest(folder)
    for each in files.files_of(folder, manifest):
        files.check_file(folder, each)
    return manifest


def test_what_was_written_is_read_again(tmp_path):
    folder = saved(tmp_path)
    assert folder.name == "step-000040" and (tmp_path / "latest").read_text() == "step-000040\n"
    manifest = looked_at(folder)
    assert {key: manifest[key] for key in NOTES} == NOTES
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "rank-0000.safetensors",
        "rank-0001.safetensors",
    ]


def test_one_that_was_never_sealed_is_not_there(tmp_path):
    saved(tmp_path)
    part = files.begin(tmp_path, 80)
    files.write_tensors(part, "rank-0000.safetensors", {"weights/a": torch.zeros(3)})
    assert [path.name for path in files.newest_first(tmp_path)] == ["step-000040"]
    assert not list(files.begin(tmp_path, 80).iterdir()), "a second try begins anew"
    files.prune(tmp_path, 1, tmp_path / "step-000040")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000040"]


def test_the_newest_are_kept(tmp_path):
    for step in (999_999, 40, 1_000_000, 80):
        saved(tmp_path, step)
    (tmp_path / "step-x").mkdir()
    assert [path.name for path in files.newest_first(tmp_path)] == [
        "step-1000000",
        "step-999999",
        "step-000080",
        "step-000040",
    ]
    files.prune(tmp_path, 2, tmp_path / "step-1000000")
    assert [path.name for path in files.newest_first(tmp_path)] == ["step-1000000", "step-999999"]
    assert files.newest_first(tmp_path / "nowhere") == []


def test_a_run_that_went_back_keeps_what_it_saves_from_there(tmp_path):
    """Step 80 was not whole, so the run went on from 40; what it saves is older by number than that folder."""
    for step in (40, 80, 50, 60):
        saved(tmp_path, step)
    files.prune(tmp_path, 2, tmp_path / "step-000060")
    assert [path.name for path in files.newest_first(tmp_path)] == ["step-000080", "step-000060", "step-000050"]
    again = saved(tmp_path, 80)
    assert looked_at(again) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file or directory; no whole checkpoint"),
        (b"", "damaged, it is not JSON"),
        (b"[" * 100_000, "damaged, it is not JSON"),
        (b"\xff\xfe", "damaged, it is not JSON"),
        (b"[]", "no checkpoint of hpctrain, it has no format"),
        (b'{"format": true}', "no checkpoint of hpctrain, it has no format"),
        (b'{"format": 2}', "of format 2, and this version reads format 1"),
        (b'{"format": ' + b"1" * 5000 + b"}", "damaged, it is not JSON"),
        (b'{"format": 1, "step": ' + b"1" * 20 + b"}", "damaged, it is too deep, or has a number too large"),
        (b'{"format": 1, "a": ' + b"[" * 33 + b"]" * 33 + b"}", "damaged, it is too deep, or has a number too large"),
        (b'{"format": 1}', "damaged, its sha256 is not that of what was written"),
    ],
)
def test_a_manifest_that_is_none_is_told(tmp_path, content, words):
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        files.read_manifest(tmp_path)
    assert str(error.value) == f"{path}: {words}"


@pytest.mark.parametrize(
    "name",
    ["../rank-0000.safetensors", "/etc/passwd", "", ".", "a/b", "a\0b", "a\nb.safetensors", "\ud800", "x" * 9999],
)
def test_a_file_elsewhere_is_not_looked_at(tmp_path, name):
    with pytest.raises(CheckpointError, match="files: .* is not the name of a file beside it"):
        files.files_of(tmp_path, {"files": [{"name": name, "bytes": 1, "sha256": ""}]})


@pytest.mark.parametrize("number, kind", [(errno.ENOSPC, OSError), (None, CheckpointError)])
def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, number, kind):
    """safetensors has an exception of its own, also for a full disk."""

    def fails(tensors, path):
        raise safetensors.SafetensorError(f"Error: it\nfailed{f' (os error {number})' if number else ''}")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(kind) as error:
        files.write_tensors(tmp_path, "rank-0000.safetensors", {})
    said = (error.value.filename, error.value.errno) if number else str(error.value)
    path = str(tmp_path / "rank-0000.safetensors")
    assert said == ((path, number) if number else f"{path}: Error: it failed")


@pytest.mark.parametrize("name", ["manifest.json", ".latest"])
def test_what_a_full_disk_cut_off_is_named(tmp_path, monkeypatch, name):
    """A write that fails does not say of itself where."""

    def fails(*args, **how):
        raise OSError(errno.ENOSPC, "No space left on device")

    if name == ".latest":
        monkeypatch.setattr(files.Path, "write_text", fails)
    else:
        monkeypatch.setattr(files, "write_json", fails)
    with pytest.raises(OSError, match="No space left on device") as error:
        saved(tmp_path)
    assert error.value.filename.endswith(f"/{name}")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Cut, or with a byte changed, taken out or put in."""
    place, kind = rng.randrange(len(content)), rng.randrange(4)
    if kind == 0:
        return content[:place]
    middle = [
        b"",
        bytes([content[place] ^ rng.randrange(1, 256)]),
        bytes([rng.randrange(256)]) + content[place : place + 1],
    ]
    return content[:place] + middle[kind - 1] + content[place + 1 :]


def same(a: bytes, b: bytes) -> bool:
    """Whether two manifests say the same."""
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["manifest.json", "rank-0001.safetensors"])
def test_whatever_is_changed_is_found_and_named(tmp_path, name):
    folder, rng = saved(tmp_path), random.Random(name)
    whole = (folder / name).read_bytes()
    for _ in range(300):
        changed = mutated(whole, rng)
        (folder / name).write_bytes(changed)
        if changed == whole or name == "manifest.json" and same(changed, whole):
            looked_at(folder)
            continue
        with pytest.raises(CheckpointError) as error:
            looked_at(folder)
        assert "\n" not in str(error.value) and name in str(error.value), error
    (folder / name).write_bytes(json.dumps(json.loads(whole), indent=4).encode() if name == "manifest.json" else whole)
    looked_at(folder)
