"""Pictures of one's own: folders and .npz files that are read, split, cached or refused in one line."""

import hashlib
import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from hpctrain.tasks.images import Images
from hpctrain.tasks.storage import DataError
from tests.harness.launch import ROOT

RANDOM = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pixels(*shape) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def save_picture(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def class_folder(folder: Path, arrays, suffix=".png") -> list[Path]:
    return [save_picture(folder / f"{number:03}{suffix}", array) for number, array in enumerate(arrays)]


def two_classes(root: Path, count=12, size=32) -> dict[str, np.ndarray]:
    arrays = {name: pixels(count, size, size, 3) for name in ("ant", "bee")}
    for name, pictures in arrays.items():
        class_folder(root / name, pictures)
    return arrays


def save_npz(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def items(task: Images, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    dataset = task.dataset(split)
    return default_collate([dataset[index] for index in range(len(dataset))])


def refusal(path, **options) -> str:
    """The line with which `path` is refused, without its beginning."""
    with pytest.raises(DataError) as caught:
        Images(data=str(path), **options).prepare()
    return told(caught.value, path)


def told(error: DataError, path) -> str:
    prefix = f"--data {path}: "
    assert str(error).startswith(prefix) and "\n" not in str(error), error
    return str(error).removeprefix(prefix)


# Folders


def test_every_tenth_picture_of_each_class_is_held_out(tmp_path):
    arrays = two_classes(tmp_path)
    for split, rows in (("train", [*range(1, 10), 11]), ("eval", [0, 10])):
        pictures, labels = items(Images(data=str(tmp_path)), split)
        assert labels.tolist() == [0] * len(rows) + [1] * len(rows)
        expected = np.concatenate([arrays["ant"][rows], arrays["bee"][rows]]).transpose(0, 3, 1, 2)
        assert pictures.shape == (2 * len(rows), 3, 32, 32) and pictures.dtype == torch.float32
        np.testing.assert_allclose(pictures * 63.75 + 127.5, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["val", "eval", "test"])
def test_a_split_of_the_folders_own_is_kept(tmp_path, name):
    train, held_out = two_classes(tmp_path / "train", 3), two_classes(tmp_path / name, 2)
    for split, arrays in (("train", train), ("eval", held_out)):
        pictures, labels = items(Images(data=str(tmp_path)), split)
        expected = np.concatenate([*arrays.values()]).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(pictures * 63.75 + 127.5, expected, atol=1e-4)
        assert labels.tolist() == [0] * len(arrays["ant"]) + [1] * len(arrays["bee"])


def test_hidden_files_other_files_and_hidden_folders_are_left_out(tmp_path):
    two_classes(tmp_path, 2)
    save_picture(tmp_path / "ant/.hidden.png", pixels(4, 4, 3))
    save_picture(tmp_path / "ant/.thumbs/a.png", pixels(4, 4, 3))
    save_picture(tmp_path / ".trash/a.png", pixels(4, 4, 3))
    save_picture(tmp_path / "loose.png", pixels(4, 4, 3))
    (tmp_path / "ant/notes.txt").write_text("not a picture")
    save_picture(tmp_path / "ant/more/A.PNG", pixels(32, 32, 3))
    task = Images(data=str(tmp_path))
    assert (len(task.dataset("train")), len(task.dataset("eval"))) == (3, 2)
    assert task.dataset("train").pixels.path(2) == str(tmp_path / "ant/more/A.PNG")


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"])
def test_every_kind_of_file_is_read(tmp_path, suffix):
    smooth = np.tile(np.linspace(0, 255, 32, dtype=np.uint8)[:, None, None], (1, 32, 3))
    for name in ("ant", "bee"):
        class_folder(tmp_path / name, [smooth] * 2, suffix)
    picture, _ = Images(data=str(tmp_path), channels=3).dataset("train")[0]
    assert picture.shape == (3, 32, 32)
    assert np.abs((picture.numpy() * 63.75 + 127.5) - smooth.transpose(2, 0, 1)).max() < 12


def test_pictures_of_any_size_and_mode_become_alike(tmp_path):
    flat = {"L": 128, "RGB": (128, 128, 128), "RGBA": (128, 128, 128, 255), "P": 5, "1": 1, "I;16": 128 << 8}
    for number, (mode, value) in enumerate(flat.items()):
        image = Image.new(mode, (10 + 7 * number, 40), value)
        if mode == "P":
            image.putpalette([128] * 768)
        for name in ("ant", "bee"):
            (tmp_path / name).mkdir(exist_ok=True)
            image.save(tmp_path / name / f"{number}.png")
    task = Images(data=str(tmp_path), size=12)
    assert task.dataset("train").pixels.channels == 1, "the first picture of each class is grey"
    values = {index: picture.unique().tolist() for index, (picture, _) in enumerate(task.dataset("train"))}
    grey = pytest.approx([(128 - 127.5) / 63.75])
    assert values == {i: pytest.approx([2.0]) if i % 5 == 3 else grey for i in range(10)}
    assert items(Images(data=str(tmp_path), size=12, channels=3), "eval")[0].shape == (2, 3, 12, 12)


def test_one_class_in_colour_makes_all_pictures_so(tmp_path):
    class_folder(tmp_path / "ant", pixels(2, 8, 8))
    class_folder(tmp_path / "bee", pixels(2, 8, 8, 3))
    assert items(Images(data=str(tmp_path)), "train")[0].shape == (2, 3, 32, 32)


def test_folders_that_do_not_fit_are_refused(tmp_path):
    assert refusal(tmp_path / "none") == "no such file or folder"
    assert (
        refusal(tmp_path) == f"{tmp_path} holds no class folder; put the pictures of each class into a folder of theirs"
    )
    class_folder(tmp_path / "ant", pixels(3, 8, 8))
    line = f"{tmp_path} holds only one class folder, ant; put the pictures of each class into a folder of theirs"
    assert refusal(tmp_path) == line
    (tmp_path / "bee").mkdir()
    line = f"the class folder {tmp_path}/bee holds no picture (png, jpg, jpeg, bmp, gif, webp)"
    assert refusal(tmp_path) == line
    class_folder(tmp_path / "bee", pixels(1, 8, 8))
    assert refusal(tmp_path) == "the class folder bee holds only one picture; it takes 2, one is held out"


@pytest.mark.parametrize("more, less", [("train", "val"), ("val", "train")])
def test_classes_that_differ_between_the_splits_are_named(tmp_path, more, less):
    two_classes(tmp_path / "train", 1, 4)
    two_classes(tmp_path / "val", 1, 4)
    class_folder(tmp_path / more / "cat", pixels(1, 4, 4))
    assert refusal(tmp_path) == f"{more} has a class folder cat, {less} has none"


@pytest.mark.parametrize("content", [b"", b"no picture", "half"])
def test_a_broken_picture_is_named_when_it_is_read(tmp_path, content):
    two_classes(tmp_path, 3)
    broken = tmp_path / "bee/001.png"
    broken.write_bytes(broken.read_bytes()[:1500] if content == "half" else content)
    dataset = Images(data=str(tmp_path)).dataset("train")
    assert dataset[1][0].shape == (3, 32, 32)
    with pytest.raises(DataError) as caught:
        dataset[2]
    assert told(caught.value, tmp_path) == f"cannot read the picture {broken}: not a picture, or a damaged one"


def test_a_first_picture_that_is_broken_is_named_at_once(tmp_path):
    two_classes(tmp_path, 2)
    (tmp_path / "bee/000.png").write_bytes(b"no picture")
    class_folder(tmp_path / "ant", pixels(1, 4, 4))
    line = f"cannot read the picture {tmp_path}/bee/000.png: not a picture, or a damaged one"
    assert refusal(tmp_path) == line


def test_a_picture_deleted_during_the_run_is_named(tmp_path):
    two_classes(tmp_path, 3)
    task = Images(data=str(tmp_path))
    (tmp_path / "ant/002.png").unlink()
    for call in (lambda: task.dataset("train")[1], task.data_sha256):
        with pytest.raises(DataError) as caught:
            call()
        assert (
            told(caught.value, tmp_path) == f"cannot read the picture {tmp_path}/ant/002.png: No such file or directory"
        )


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    two_classes(tmp_path, 2)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(tmp_path) == f"cannot read {tmp_path}: Permission denied"


def test_without_pillow_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert refusal(tmp_path) == 'pictures are decoded by Pillow: pip install "hpctrain[data]"'


@pytest.mark.parametrize("option, value, wanted", [("size", 3, "at least 4"), ("channels", 2, "1 (grey) or 3 (RGB)")])
def test_an_option_that_no_picture_fits_is_named(tmp_path, option, value, wanted):
    two_classes(tmp_path, 2)
    with pytest.raises(ValueError) as caught:
        Images(data=str(tmp_path), **{option: value})
    assert str(caught.value) == f"--task-option {option}={value}: should be {wanted}"


def test_digest_and_stamp_of_a_folder_follow_its_pictures(tmp_path):
    arrays = two_classes(tmp_path, 3)

    def facts():
        task = Images(data=str(tmp_path))
        return task.data_sha256(), task.data_stamp()

    before = facts()
    assert facts() == before
    save_picture(tmp_path / "ant/001.png", 255 - arrays["ant"][1])
    changed = facts()
    (tmp_path / "ant/001.png").rename(tmp_path / "ant/001b.png")
    renamed = facts()
    for which in range(2):
        assert len({before[which], changed[which], renamed[which]}) == 3


def test_a_data_set_of_files_travels_to_another_process(tmp_path):
    two_classes(tmp_path, 3)
    dataset = Images(data=str(tmp_path)).dataset("train")
    other = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(other[3][0], dataset[3][0])


# Arrays


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
