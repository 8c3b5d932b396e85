"""Bytes to train on: windows that share no byte between splits, and files that are read or refused."""

import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from hpctrain.tasks import windows as windows_module
from hpctrain.tasks.corpus import InMemory, open_text
from hpctrain.tasks.storage import DataError
from hpctrain.tasks.text import Text
from hpctrain.tasks.windows import Windows, pieces, scan, shortest
from tests.harness.launch import ROOT
from tests.tasks.descriptors import open_below


def write(path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def read_all(path) -> bytes:
    content = open_text(str(path))
    return content.read(0, len(content)).tobytes()


@pytest.mark.parametrize("context", [2, 3, 7])
@pytest.mark.parametrize("extra", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("num_blocks", [1, 2, 9, 10, 11, 20, 21, 25])
def test_splits_share_no_byte_and_leave_none_out(num_blocks, extra, context):
    block = 16 * context + 1
    size = num_blocks * block + extra
    content = np.arange(size)
    places, targets = {}, []
    for split in (True, False):
        windows = Windows(InMemory(content), context, held_out=split)
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
    windows = Windows(InMemory(content), 4, held_out=False)
    inputs, targets = windows[1]
    assert inputs.tolist() == [69, 70, 71, 72] and targets.tolist() == [70, 71, 72, 73]
    assert inputs.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize("index", [-1, 16])
def test_an_index_out_of_range_is_an_index_error(index):
    windows = Windows(InMemory(np.zeros(65, np.uint8)), 4, held_out=True)
    assert len(windows) == 16
    with pytest.raises(IndexError):
        windows[index]


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
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    assert read_all(tmp_path) == b"yyzzbb"


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


def test_a_folder_with_a_token_file_is_no_folder_of_text(tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros(9, np.uint16))
    write(tmp_path / "ids.json", b'{"vocab_size": 5}')
    expected = f"the folder holds a token file; name it: --data {tmp_path}/ids.npy"
    assert data_refusal(tmp_path) == expected


@pytest.mark.parametrize("folder", [False, True])
def test_a_read_that_fails_names_the_file(tmp_path, monkeypatch, folder):
    file = write(tmp_path / "a.txt", b"abc")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", file)

    monkeypatch.setattr(os, "open", refuse)
    assert data_refusal(tmp_path if folder else file) == f"cannot read {file}: Permission denied"


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert data_refusal(tmp_path) == f"cannot read {tmp_path}: Permission denied"


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
    with pytest.raises(DataError, match="^--data: this Python lacks pydoc_data, the built-in text; name a file"):
        open_text(None)


def text_of(size: int) -> bytes:
    return np.random.Generator(np.random.PCG64(5)).integers(1, 256, size, np.uint8).tobytes()


def test_a_file_a_folder_and_memory_give_the_same_windows(tmp_path):
    text, start = text_of(5000), 0
    write(tmp_path / "one", text)
    for number, size in enumerate([1, 7, 300, 1, 2000, 90, 2601]):
        write(tmp_path / "many" / f"{number // 2}" / f"{number}.txt", text[start : start + size])
        start += size
    contents = [InMemory(np.frombuffer(text, np.uint8)), *(open_text(str(tmp_path / name)) for name in ("one", "many"))]
    for held_out in (False, True):
        memory, file, folder = (Windows(content, 8, held_out) for content in contents)
        assert len(memory) == len(file) == len(folder) > 30
        for index in range(len(memory)):
            for one, other, third in zip(memory[index], file[index], folder[index]):
                assert torch.equal(one, other) and torch.equal(one, third)
        assert (memory.pair_counts(256) == folder.pair_counts(256)).all()
    assert len({scan(content, None) for content in contents}) == 1


def test_every_range_of_a_folder_is_that_of_its_bytes(tmp_path):
    for name in ("abc", "d", "efgh"):
        write(tmp_path / name, name.encode())
    content = open_text(str(tmp_path))
    copy = pickle.loads(pickle.dumps(content))
    for start in range(9):
        for stop in range(start, 9):
            assert content.read(start, stop).tobytes() == copy.read(start, stop).tobytes() == b"abcdefgh"[start:stop]


def test_the_order_of_a_folder_is_that_of_path_parts(tmp_path):
    for name in ("a/z", "a-b", "a.txt", "a/b/c"):
        write(tmp_path / "data" / name, name.encode())
    assert read_all(tmp_path / "data") == b"a/b/ca/za-ba.txt"


def test_at_most_64_files_of_a_folder_are_open(tmp_path):
    for number in range(200):
        write(tmp_path / f"{number:03d}", b"%03d" % number)
    content = open_text(str(tmp_path))
    assert content.read(0, 600).tobytes() == b"".join(b"%03d" % number for number in range(200))
    assert open_below(tmp_path) == 64
    del content
    assert open_below(tmp_path) == 0


def test_data_that_become_shorter_or_go_while_they_are_read_are_one_line(tmp_path):
    single, first, second = (write(tmp_path / name, text_of(400)) for name in ("a.txt", "f/a", "f/b"))
    task, folder = Text(context=4, data=single), Text(context=4, data=str(tmp_path / "f"))
    assert len(task.dataset("train")[0][0]) == 4
    os.truncate(single, 10)
    with pytest.raises(DataError) as caught:
        task.dataset("train")[3]
    assert str(caught.value) == f"--data {single}: {single} became shorter while it was read"
    os.truncate(first, 10)
    with pytest.raises(DataError) as caught:
        folder.baseline()
    assert str(caught.value) == f"--data {tmp_path / 'f'}: {first} became shorter while it was read"
    os.unlink(second)
    with pytest.raises(DataError) as caught:
        folder.dataset("eval")[-1 + len(folder.dataset("eval"))]
    assert str(caught.value) == f"--data {tmp_path / 'f'}: cannot read {second}: No such file or directory"


def test_a_single_file_that_is_deleted_stays_readable(tmp_path):
    path = write(tmp_path / "a.txt", text_of(400))
    task = Text(context=4, data=path)
    before = task.dataset("train")[7]
    os.unlink(path)
    assert torch.equal(before[0], task.dataset("train")[7][0])


@pytest.mark.parametrize("held_out", [False, True])
def test_counts_are_those_of_windows_spread_evenly(monkeypatch, held_out):
    content = InMemory(np.frombuffer(text_of(20 * 65), np.uint8) % 5)
    windows = Windows(content, 4, held_out)
    monkeypatch.setattr(windows_module, "COUNTED_TOGETHER", 12)  # several rounds
    for limit, step in ((1 << 16, 1), (len(windows) // 4, 4)):
        monkeypatch.setattr(windows_module, "COUNTED_WINDOWS", limit)
        pairs = np.zeros((5, 5), int)
        for index in range(0, len(windows), step):
            inputs, targets = windows[index]
            for pair in zip(inputs.tolist(), targets.tolist()):
                pairs[pair] += 1
        np.testing.assert_array_equal(windows.pair_counts(5), pairs)
        np.testing.assert_array_equal(windows.target_counts(5), pairs.sum(0))


def test_a_scan_tells_the_largest_item_and_where_it_first_stands():
    items = np.full(9 << 20, 3, np.uint8)
    items[[6 << 20, 7 << 20]] = 9
    found = scan(InMemory(items), None)
    assert (found.largest, found.place) == (9, 6 << 20)
    assert [len(piece) for piece in pieces(InMemory(items), 4 << 20)] == [4 << 20, 4 << 20, 1 << 20]


def test_a_long_scan_is_made_once_for_a_stamp(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(windows_module, "KEPT_FROM", 100)
    path = write(tmp_path / "a.txt", text_of(400))
    task, made = Text(context=4, data=path), []
    one_pass = windows_module._scan
    monkeypatch.setattr(windows_module, "_scan", lambda content: made.append(content) or one_pass(content))
    digests = {task.data_sha256(), Text(context=4, data=path).data_sha256()}
    assert len(digests) == len(made) == 1
    write(tmp_path / "a.txt", text_of(399) + b"!")
    os.utime(path, (1e9, 1e9))
    assert Text(context=4, data=path).data_sha256() not in digests and len(made) == 2
    monkeypatch.setenv("HPCTRAIN_CACHE", path)
    assert len(Text(context=4, data=path).data_sha256()) == 64 and len(made) == 3


LARGE = """
import sys
import numpy as np
from hpctrain.tasks.text import Text
def peak():  # of this process alone: ru_maxrss may begin with that of the process that started it
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
task = Text(data=sys.argv[1])
windows = task.dataset("train")
windows[0]  # torch is loaded
before = peak()
for index in np.random.default_rng(0).integers(0, len(windows), 1000):
    assert (windows[index][0] == 32).all()
print(peak() - before)
task.prepare()
task.baseline()
print(peak() - before)
"""


@pytest.mark.wide
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_a_large_file_takes_little_memory(tmp_path):
    with open(tmp_path / "large.txt", "wb") as stream:
        for _ in range(200):
            stream.write(b" " * (1 << 20))
    environment = {**os.environ, "HPCTRAIN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LARGE, str(tmp_path / "large.txt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    random_reads, scanned = map(int, done.stdout.split())
    assert random_reads < 16 << 10 and scanned < 64 << 10, "KiB"
