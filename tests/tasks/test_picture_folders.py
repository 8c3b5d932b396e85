"""Folders of pictures: read, split, made alike, or refused in one line."""

import os
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.tasks.images import Images
from hpctrain.tasks.storage import DataError
from tests.tasks.picture_files import class_folder, items, pixels, refusal, save_picture, told, two_classes


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


def test_what_only_has_the_name_of_a_picture_is_left_out(tmp_path):
    """A pipe would be waited on for ever."""
    two_classes(tmp_path)
    os.mkfifo(tmp_path / "ant" / "pipe.png")
    (tmp_path / "ant" / "nowhere.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "ant" / "folder.png").mkdir()
    task = Images(data=str(tmp_path))
    assert len(task.dataset("train")) + len(task.dataset("eval")) == 24
    assert len(task.data_sha256()) == 64
