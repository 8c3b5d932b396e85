"""Bytes to train on: windows that share no byte between splits, and files that are read or refused."""

import math

import numpy as np
import pytest
import torch

from hpctrain.tasks.corpus import Windows, read_bytes, shortest
from hpctrain.tasks.text import Text


def write(path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("context", [2, 3, 7])
@pytest.mark.parametrize("extra", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("num_blocks", [1, 2, 9, 10, 11, 20, 21, 25])
def test_splits_share_no_byte_and_leave_none_out(num_blocks, extra, context):
    block = 16 * context + 1
    size = num_blocks * block + extra
    content = np.arange(size)
    places, targets = {}, []
    for split in (True, False):
        windows = Windows(content, context, held_out=split)
        spans = [range(start, start + context + 1) for start in windows.starts(np.arange(len(windows)))]
        assert all(span.start >= 0 and span.stop <= size for span in spans)
        places[split] = {place for span in spans for place in span}
        assert {place // block % 10 == 0 for place in places[split]} <= {split}
        targets += [place for span in spans for place in span[1:]]
    assert not places[True] & places[False]
    assert len(targets) == len(set(targets)), "a byte is predicted twice in an epoch"
    last_block = range(num_blocks * block, size)
    whole_windows = (len(last_block) - 1) // context * context + 1 if len(last_block) > context else 0
    expected = {p for p in range(num_blocks * block + whole_windows) if p % block}
    assert set(targets) == expected


def test_an_item_is_the_window_and_the_same_moved_by_one():
    content = np.frombuffer(bytes(range(200)), np.uint8)
    windows = Windows(content, 4, held_out=False)
    inputs, targets = windows[1]
    assert inputs.tolist() == [69, 70, 71, 72] and targets.tolist() == [70, 71, 72, 73]
    assert inputs.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize("index", [-1, 16])
def test_an_index_out_of_range_is_an_index_error(index):
    windows = Windows(np.zeros(65, np.uint8), 4, held_out=True)
    assert len(windows) == 16
    with pytest.raises(IndexError):
        windows[index]


def test_a_file_is_mapped_not_read(tmp_path):
    path = write(tmp_path / "a.txt", b"abc" * 100)
    content = read_bytes(path)
    assert isinstance(content, np.memmap) and content.tobytes() == b"abc" * 100


def test_a_folder_is_read_in_order_without_hidden_empty_and_binary_files(tmp_path):
    for name, content in {
        "b.txt": b"bb",
        "a/z.md": b"zz",
        "a/y": b"yy",
        "empty.txt": b"",
        "image.png": b"\x89PNG\r\n\x1a\n\0\0",
        ".git/config": b"hidden",
        ".hidden.txt": b"hidden",
    }.items():
        write(tmp_path / name, content)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert read_bytes(str(tmp_path)).tobytes() == b"yyzzbb"


def data_refusal(path, **options) -> str:
    with pytest.raises(ValueError) as caught:
        Text(data=str(path), **options)
    prefix = f"--data {path}: "
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix)


def test_data_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    assert data_refusal(tmp_path / "none") == "no such file or folder"
    assert data_refusal(write(tmp_path / "e/empty.txt", b"")) == "the file is empty"
    assert data_refusal("/dev/null") == "neither a file nor a folder"
    utf16 = write(tmp_path / "utf16.txt", "text".encode("utf-16-le"))
    assert data_refusal(utf16) == "not text, byte 1 is NUL; save a text in UTF-16 as UTF-8"
    nothing = "the folder holds no text file; hidden, empty and binary files do not count"
    assert data_refusal(tmp_path / "e") == nothing


@pytest.mark.parametrize("folder", [False, True])
def test_a_read_that_fails_names_the_file(tmp_path, monkeypatch, folder):
    file = write(tmp_path / "a.txt", b"abc")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr(np, "memmap", refuse)
    assert data_refusal(tmp_path if folder else file) == f"cannot read {file}: Permission denied"


@pytest.mark.parametrize("context", [2, 8, 64])
def test_the_shortest_text_has_a_window_in_both_splits_and_a_shorter_one_is_refused(tmp_path, context):
    needed = shortest(context)
    task = Text(context=context, data=write(tmp_path / "a.txt", b"a" * needed))
    assert (len(task.dataset("eval")), len(task.dataset("train"))) == (16, 1)
    assert math.isfinite(task.baseline()["loss"])
    assert data_refusal(write(tmp_path / "b.txt", b"a" * (needed - 1)), context=context) == (
        f"{needed - 1} bytes are too few; one window to train on and one to hold out take {needed} bytes"
        f" at --task-option context={context}"
    )


def test_a_python_without_the_built_in_text_says_what_to_do(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="^--data: this Python lacks pydoc_data, the built-in text; name a file"):
        read_bytes(None)
