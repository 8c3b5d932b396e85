"""Pictures in .npz files: unpacked once, read by all ranks, or refused in one line."""

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.tasks.images import Images
from hpctrain.tasks.storage import DataError
from tests.harness.launch import ROOT
from tests.tasks.picture_files import RANDOM, items, pixels, refusal, save_npz, told, two_classes


def test_the_same_pictures_in_arrays_and_in_folders_are_the_same_rows(tmp_path):
    train, held_out = two_classes(tmp_path / "f/train", 3), two_classes(tmp_path / "f/val", 2)
    joined = {"x_train": train, "x_test": held_out}
    x = {name: np.concatenate([*arrays.values()]) for name, arrays in joined.items()}
    y = {"y_train": np.repeat([0, 1], 3), "y_test": np.repeat([0, 1], 2)}
    folder, arrays = Images(data=str(tmp_path / "f")), Images(data=save_npz(tmp_path / "a.npz", **x, **y))
    for split in ("train", "eval"):
        for ours, theirs in zip(items(folder, split), items(arrays, split), strict=True):
            assert torch.equal(ours, theirs)
    assert folder.baseline() == arrays.baseline()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("x, y", [("x", "y"), ("images", "labels"), ("x_train", "y_train")])
def test_without_a_split_every_tenth_row_is_held_out(tmp_path, x, y, save):
    pictures, labels = pixels(21, 5, 7), np.arange(21) % 3
    save(tmp_path / "a.npz", **{x: pictures, y: labels.astype(np.uint8)[:, None]}, note=np.array(["ignored"]))
    task = Images(data=str(tmp_path / "a.npz"))
    held_out = np.arange(21) % 10 == 0
    for split, rows in (("train", ~held_out), ("eval", held_out)):
        read, read_labels = items(task, split)
        assert read.shape == (rows.sum(), 1, 5, 7) and read.dtype == torch.float32
        np.testing.assert_allclose(read[:, 0] * 63.75 + 127.5, pictures[rows], atol=1e-4)
        assert read_labels.dtype == torch.int64 and read_labels.tolist() == labels[rows].tolist()


@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f8", "<f2"])
def test_floats_are_taken_as_they_are(tmp_path, dtype):
    pictures = RANDOM.standard_normal((4, 4, 6, 2)).astype(dtype)
    task = Images(data=save_npz(tmp_path / "a.npz", x=pictures, y=np.array([0, 1, 0, 1])))
    read, _ = items(task, "train")
    assert read.dtype == torch.float32 and read.shape == (3, 2, 4, 6)
    np.testing.assert_array_equal(read.numpy(), pictures[1:].transpose(0, 3, 1, 2).astype(np.float32))


def test_prepare_unpacks_once_and_a_changed_file_again(tmp_path, cache):
    path = save_npz(tmp_path / "a.npz", x=pixels(4, 4, 4), y=np.arange(4))
    task = Images(data=path)
    assert not cache.exists()
    task.prepare()
    (unpacked,) = cache.iterdir()
    before = unpacked.stat().st_mtime_ns
    Images(data=path).prepare()
    assert [file.stat().st_mtime_ns for file in cache.iterdir()] == [before]
    np.testing.assert_array_equal(np.load(unpacked), np.load(path)["x"])
    stamp, digest = task.data_stamp(), task.data_sha256()
    assert digest == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    changed = pixels(4, 4, 4)
    save_npz(path, x=changed, y=np.arange(4))
    again = Images(data=path)
    assert again.data_stamp() != stamp and again.data_sha256() != digest
    np.testing.assert_allclose(again.dataset("eval")[0][0][0] * 63.75 + 127.5, changed[0], atol=1e-4)


def test_a_process_after_prepare_reads_what_was_unpacked(tmp_path, cache):
    path = save_npz(tmp_path / "a.npz", x=pixels(4, 4, 4), y=np.arange(4))
    task = Images(data=path)
    task.prepare()
    program = (
        "import sys; from hpctrain.tasks import picture_arrays; from hpctrain.tasks.images import Images\n"
        "picture_arrays.Member._write = None\n"
        "print(Images(data=sys.argv[1]).dataset('train')[0][0].sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) == task.dataset("train")[0][0].sum().item()


X, Y = pixels(6, 4, 4), np.array([0, 1, 2] * 2)
WANTED = "wanted are x_train, y_train, x_test, y_test, or x, y, or images, labels"
SHAPE = "wanted is (rows, height, width) or (rows, height, width, channels), sides of 4 or more, 1 to 4 channels"
ALIKE = "they should be alike"
ARRAYS = {
    "no names": ({"a": X, "b": Y}, f"lacks pictures and labels; it has a, b; {WANTED}"),
    "nothing": ({}, f"lacks pictures and labels; it has no arrays; {WANTED}"),
    "no labels": ({"images": X}, f"lacks labels; it has images; {WANTED}"),
    "no pictures": ({"y": Y}, f"lacks x; it has y; {WANTED}"),
    "half a split": ({"x_train": X, "x_test": X}, f"lacks y_train, y_test; it has x_train, x_test; {WANTED}"),
    "lengths": ({"x": X, "y": Y[:5]}, "y has the shape (5,), x has 6 rows; wanted is (6,)"),
    "one hot": ({"x": X, "y": np.eye(6, 3, dtype=int)}, "y has the shape (6, 3), x has 6 rows; wanted is (6,)"),
    "float labels": ({"x": X, "y": Y / 2}, "y holds float64; labels are whole numbers from 0"),
    "words": ({"x": X, "y": Y.astype(str)}, "y holds <U21; labels are whole numbers from 0"),
    "negative": ({"x": X, "y": Y - 1}, "y has the label -1; number the classes from 0 without gaps"),
    "a gap": ({"x": X, "y": Y * 1000}, "y has the label 2000; number the classes from 0 without gaps"),
    "one class": ({"x": X, "y": Y * 0}, "y has the label 0 only; there is no choice to learn"),
    "flat": ({"x": X.reshape(6, 16), "y": Y}, f"x has the shape (6, 16); {SHAPE}"),
    "a number": ({"x": np.uint8(1), "y": Y}, f"x has the shape (); {SHAPE}"),
    "channels first": ({"x": pixels(6, 3, 8, 8), "y": Y}, f"x has the shape (6, 3, 8, 8); {SHAPE}"),
    "small": ({"x": pixels(6, 4, 3), "y": Y}, f"x has the shape (6, 4, 3); {SHAPE}"),
    "no channels": ({"x": X[..., None][..., :0], "y": Y}, f"x has the shape (6, 4, 4, 0); {SHAPE}"),
    "one row": ({"x": X[:1], "y": Y[:1]}, "x has 1 rows; there should be at least 2"),
    "integers": ({"x": X.astype(int), "y": Y}, "x holds int64; pictures are uint8 or floats"),
    "columns": (
        {"x": np.asfortranarray(X), "y": Y},
        "x is stored column by column (Fortran order); save np.ascontiguousarray of it",
    ),
    "objects": (
        {"x": X.astype(object), "y": Y},
        "x holds Python objects, which are never loaded; save numbers: np.asarray(x, 'uint8')",
    ),
    "object labels": ({"x": X, "y": Y.astype(object)}, "y holds object; labels are whole numbers from 0"),
    "shapes differ": (
        {"x_train": X, "y_train": Y, "x_test": pixels(6, 4, 5), "y_test": Y},
        f"x_train has uint8 pictures of shape (4, 4), x_test has uint8 pictures of shape (4, 5); {ALIKE}",
    ),
    "types differ": (
        {"x_train": X, "y_train": Y, "x_test": X / 255, "y_test": Y},
        f"x_train has uint8 pictures of shape (4, 4), x_test has float64 pictures of shape (4, 4); {ALIKE}",
    ),
    "a new class": (
        {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1},
        "y_test has the label 3, y_train none above 2",
    ),
}


@pytest.mark.parametrize("arrays, line", ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, line):
    assert refusal(save_npz(tmp_path / "a.npz", **arrays)) == line


def damaged(content: bytes) -> bytes:
    """An archive whose directory is whole and whose first array has other bytes than it promises."""
    middle = len(content) // 4
    return content[:middle] + bytes(byte ^ 255 for byte in content[middle : middle + 64]) + content[middle + 64 :]


CUT = "the file is cut off or damaged; copy it again"


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda content: b"", "neither a folder nor an .npz file"),
        (lambda content: b"no archive", "neither a folder nor an .npz file"),
        (lambda content: content[: len(content) // 2], CUT),
        (damaged, CUT),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_refused_and_leaves_nothing_in_the_cache(tmp_path, cache, change, line, save):
    file = io.BytesIO()
    save(file, x=pixels(64, 8, 8), y=np.arange(64) % 2)
    path = tmp_path / "a.npz"
    path.write_bytes(change(file.getvalue()))
    assert refusal(path) == line
    assert not cache.exists() or not list(cache.iterdir())


def test_a_member_that_is_no_array_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"no array")
        archive.writestr("y.npy", b"")
    assert refusal(tmp_path / "a.npz") == CUT


def test_an_array_shorter_than_its_header_says_is_refused(tmp_path, cache):
    whole = io.BytesIO()
    np.save(whole, X)
    labels = io.BytesIO()
    np.save(labels, Y)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", whole.getvalue()[:-5])
        archive.writestr("y.npy", labels.getvalue())
    assert refusal(tmp_path / "a.npz") == CUT


def test_a_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    path = save_npz(tmp_path / "a.npz", x=X, y=Y)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hpctrain.tasks.picture_arrays.open", refuse, raising=False)
    assert refusal(path) == "cannot read it: Permission denied"


def test_a_file_deleted_before_it_is_unpacked_is_named(tmp_path, cache):
    path = save_npz(tmp_path / "a.npz", x=X, y=Y)
    task = Images(data=path)
    os.unlink(path)
    with pytest.raises(DataError) as caught:
        task.prepare()
    assert told(caught.value, path) == "cannot read it: No such file or directory"
    with pytest.raises(DataError) as caught:
        task.data_sha256()
    assert told(caught.value, path) == "cannot read it: No such file or directory"


def test_what_was_unpacked_and_became_shorter_is_named(tmp_path, cache):
    path = save_npz(tmp_path / "a.npz", x=X, y=Y)
    task = Images(data=path)
    task.prepare()
    (unpacked,) = cache.iterdir()
    os.truncate(unpacked, 200)
    with pytest.raises(DataError) as caught:
        items(task, "train")
    assert told(caught.value, path) == f"{unpacked} became shorter while it was read"


@pytest.mark.parametrize("option", ["size", "channels"])
def test_arrays_are_neither_resized_nor_converted(tmp_path, option):
    path = save_npz(tmp_path / "a.npz", x=X, y=Y)
    with pytest.raises(ValueError, match=rf"^--task-option {option}=3: should be left out: only pictures in a folder"):
        Images(data=path, **{option: 3})
