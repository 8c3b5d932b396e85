"""Files read by position, files made once, and what became of a file meanwhile."""

import os
import pickle
import threading

import numpy as np
import pytest

from hpctrain.tasks.storage import DataError, FileArray, cached, open_npy, stamp
from tests.tasks.descriptors import open_below

CURE = "np.save(path, np.ascontiguousarray(array)) writes one that fits"


def saved(path, array) -> str:
    np.save(path, array)
    return str(path)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", ">f8", "?", "u1"])
@pytest.mark.parametrize("shape", [(7,), (5, 3, 2), (0, 4), (3, 0)])
def test_rows_are_those_of_the_saved_array(tmp_path, dtype, shape):
    array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    rows = open_npy(saved(tmp_path / "a.npy", array))
    assert rows.shape == shape and len(rows) == shape[0] and rows.dtype == array.dtype.newbyteorder("=")
    for start in range(len(rows) + 1):
        for stop in range(start, len(rows) + 1):
            part = rows.read(start, stop)
            assert part.dtype.isnative and part.flags.writeable
            np.testing.assert_array_equal(part, array[start:stop])
    pieces = list(rows.pieces(2))
    assert [len(piece) for piece in pieces] == [2] * (len(rows) // 2) + [1] * (len(rows) % 2)
    np.testing.assert_array_equal(np.concatenate([array[:0], *pieces]), array)


def test_without_a_shape_it_is_all_whole_items_after_the_offset(tmp_path):
    (tmp_path / "a").write_bytes(b"xx" + np.arange(5, dtype="<u4").tobytes() + b"y")
    assert FileArray(tmp_path / "a", "<u4", offset=2).read(0, 5).tolist() == [0, 1, 2, 3, 4]


def test_pieces_are_bounded(tmp_path):
    rows = open_npy(saved(tmp_path / "a.npy", np.zeros((3, 1 << 20), np.float32)))
    assert [len(piece) for piece in rows.pieces()] == [1, 1, 1]
    (tmp_path / "b").write_bytes(bytes((4 << 20) + 1))
    assert [len(piece) for piece in FileArray(tmp_path / "b", np.uint8).pieces()] == [4 << 20, 1]


def test_a_file_that_becomes_shorter_is_one_line(tmp_path):
    path = saved(tmp_path / "a.npy", np.arange(100))
    rows = open_npy(path)
    assert rows.read(0, 100).sum() == 4950
    os.truncate(path, 128 + 8 * 50)
    assert rows.read(0, 50).sum() == 1225
    with pytest.raises(DataError) as caught:
        rows.read(49, 51)
    assert str(caught.value) == f"--data {path}: {path} became shorter while it was read"


def test_an_open_file_that_is_deleted_stays_readable_and_one_that_was_not_open_is_one_line(tmp_path):
    path = saved(tmp_path / "a.npy", np.arange(3))
    opened, later = open_npy(path), open_npy(path)
    opened.read(0, 1)
    os.unlink(path)
    assert opened.read(0, 3).tolist() == [0, 1, 2]
    with pytest.raises(DataError) as caught:
        later.read(0, 3)
    assert str(caught.value) == f"--data {path}: cannot read {path}: No such file or directory"


def test_a_copy_for_another_process_opens_the_file_itself(tmp_path):
    rows = open_npy(saved(tmp_path / "a.npy", np.arange(3)))
    rows.read(0, 1)
    copy = pickle.loads(pickle.dumps(rows))
    rows.close()
    assert copy.read(0, 3).tolist() == rows.read(0, 3).tolist() == [0, 1, 2]


def test_no_descriptor_is_left_over(tmp_path):
    path = saved(tmp_path / "a.npy", np.arange(3))
    rows = open_npy(path)
    rows.read(0, 3)
    assert open_below(tmp_path) == 1
    del rows
    for _ in range(5):
        open_npy(path).read(0, 3)
    assert open_below(tmp_path) == 0


@pytest.mark.parametrize(
    ("array", "line"),
    [
        (np.int64(3), f"holds a single number, not an array with a first axis; {CURE}"),
        (np.zeros((2, 3), order="F"), f"stored column by column (Fortran order); {CURE}"),
        (np.array(["a"]), f"holds items of type <U1, which are no plain numbers; {CURE}"),
        (np.array([{}], object), f"holds items of type object, which are no plain numbers; {CURE}"),
        (np.zeros(3, [("a", "i4")]), f"holds items of type [('a', '<i4')], which are no plain numbers; {CURE}"),
    ],
)
def test_an_array_of_another_kind_is_refused(tmp_path, array, line):
    path = saved(tmp_path / "a.npy", array)
    with pytest.raises(DataError) as caught:
        open_npy(path)
    assert str(caught.value) == f"--data {path}: {line}"


@pytest.mark.parametrize(
    "content", [b"", b"text", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x04\x00{(\x00\n", b"\x93NUMPY\x09\x00"]
)
def test_what_is_no_npy_file_is_refused(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_npy(tmp_path / "a.npy")
    assert str(caught.value) == f"--data {tmp_path / 'a.npy'}: not a .npy file; {CURE}"


def test_a_file_shorter_than_its_header_says_is_refused(tmp_path):
    path = saved(tmp_path / "a.npy", np.arange(10))
    os.truncate(path, 128 + 79)
    with pytest.raises(DataError) as caught:
        open_npy(path)
    assert str(caught.value) == f"--data {path}: the file has 207 bytes, its header promises 208; copy it again"
    with pytest.raises(DataError, match=f"^--data {tmp_path}/no.npy: cannot read it: No such file or directory$"):
        open_npy(tmp_path / "no.npy")


def test_a_cached_file_is_made_once(cache):
    made = []

    def write(path):
        made.append(path)
        path.write_bytes(b"whole")

    first, again, other = cached("a", ".bin", write), cached("a", ".bin", write), cached("b", ".bin", write)
    assert first == again != other and len(made) == 2
    assert sorted(cache.iterdir()) == sorted([first, other]) and first.read_bytes() == b"whole"


def test_the_default_folders(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCTRAIN_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cached("a", ".x", lambda path: path.touch()).parent == tmp_path / "home/.cache/hpctrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cached("a", ".x", lambda path: path.touch()).parent == tmp_path / "xdg/hpctrain"


def test_processes_that_make_it_at_once_end_with_one_whole_file(cache):
    both = threading.Barrier(2, timeout=30)

    def write(path):
        path.write_bytes(b"wh")
        both.wait()  # both found nothing, and both files are half written
        with path.open("ab") as stream:
            stream.write(b"ole")

    threads = [threading.Thread(target=cached, args=("a", ".bin", write)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (only,) = cache.iterdir()
    assert only.read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (OSError(28, "No space left on device"), "cannot keep a file in {}: No space left on device"),
        (DataError("--data x: the file became shorter"), "--data x: the file became shorter"),
        (KeyboardInterrupt("now"), "now"),
    ],
)
def test_a_write_that_fails_leaves_nothing(cache, fault, line):
    def write(path):
        path.write_bytes(b"half")
        raise fault

    with pytest.raises((DataError, KeyboardInterrupt)) as caught:
        cached("a", ".bin", write)
    assert line.format(cache) in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError) as caught:
        cached("a", ".bin", lambda path: path.touch())
    assert str(caught.value) == (
        f"HPCTRAIN_CACHE: cannot keep a file in {tmp_path}/file: File exists; set HPCTRAIN_CACHE to a folder with room"
    )


def test_a_file_that_changed_or_went_is_told(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    before = stamp(path)
    path.read_bytes()
    assert stamp(before.path) == before
    with path.open("ab") as stream:
        stream.write(b"d")
    assert stamp(before.path) != before
    path.unlink()
    assert stamp(before.path) != before


def test_a_replaced_file_of_the_same_size_and_time_has_changed(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    for each in (path, other):
        each.write_bytes(b"abc")
        os.utime(each, (1e9, 1e9))
    before = stamp(path)
    other.replace(path)
    assert stamp(before.path) != before


@pytest.mark.parametrize("change", ["add", "remove", "rename", "inside"])
def test_a_folder_changes_with_its_files(tmp_path, change):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    for name in ("a", "sub/b", "sub/.hidden"):
        (folder / name).write_bytes(b"abc")
    before = stamp(folder)
    (folder / "sub/.hidden").write_bytes(b"other")
    assert stamp(before.path) == before
    if change == "add":
        (folder / "sub/c").touch()
    elif change == "remove":
        (folder / "sub/b").unlink()
    elif change == "rename":
        (folder / "sub/b").rename(folder / "sub/c")
    else:
        (folder / "sub/b").write_bytes(b"longer")
    assert stamp(before.path) != before


def test_a_folder_that_went_is_told(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    before = stamp(folder)
    folder.rmdir()
    assert stamp(before.path) != before
    assert stamp(folder) == stamp(folder)
