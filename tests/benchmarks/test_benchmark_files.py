"""What all benchmarks share before they measure: files that can be written, memory that is there."""

import importlib
import os
import re
import sys
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, run_python

PEERS = ("allreduce", "data_parallel", "device_step", "messages", "pipeline", "stream")
PROGRAMS = ("pipeline_bubble", "push_pull", "staleness", *(f"peers/{name}" for name in PEERS))


@pytest.fixture(scope="module")
def figures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("figures")


def refused(figures, capsys, **names):
    """The line for these files, of a program that would write them."""
    flags = SimpleNamespace(**names)
    found = figures.settle("some.py", lambda argv, size, rank: flags, [], None)
    err = capsys.readouterr().err
    assert (found is None) == bool(err) and err.count("\n") <= 1
    return err.rstrip("\n")


@pytest.mark.parametrize(
    "file, why",
    [
        ("nowhere/x.json", "No such file or directory"),
        (".", "Is a directory"),
        ("", "No such file or directory"),
        (None, None),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_anything_runs(figures, capsys, tmp_path, file, why, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = why and f"some.py: --json {file}: {why}; expected a file in a folder that can be written to"
    assert refused(figures, capsys, json=file) == (expected or "")


def test_a_look_at_files_leaves_them_as_they_are(figures, capsys, tmp_path):
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("kept")
    assert not refused(figures, capsys, json=str(there)) and not refused(figures, capsys, json=str(new))
    assert there.read_text() == "kept" and not new.exists()


@pytest.mark.parametrize("name", ("x", "x.foo", "png"))
def test_a_picture_has_a_name_that_tells_its_format(figures, capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    line = refused(figures, capsys, json=None, plot=str(file))
    assert line.startswith(f"some.py: --plot {file}: expected a name that ends in one of .") and ".png" in line
    assert not refused(figures, capsys, json=None, plot=f"{file}.png")
    assert refused(figures, capsys, plot=str(tmp_path / "no/x.png")).startswith("some.py: --plot ")


def test_a_picture_without_matplotlib_is_refused(figures, capsys, monkeypatch):
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    assert refused(figures, capsys, plot="x.png").startswith("some.py: --plot: matplotlib is not installed")


def test_one_rank_that_refuses_is_told_to_all(figures, capsys):
    ranks = SimpleNamespace(rank=0, size=2, allgather=lambda mine: [mine, "--flag: no, on rank 1"])
    assert figures.settle("some.py", lambda argv, size, rank: SimpleNamespace(), [], ranks) is None
    assert capsys.readouterr().err == "some.py: --flag: no, on rank 1\n"


def test_memory_is_counted_for_each_host(figures, monkeypatch):
    monkeypatch.setattr(figures, "_bytes_free", lambda: 5 << 30)
    mine, other = os.uname().nodename, ("other", 1 << 30, 8 << 30)
    ranks = SimpleNamespace(allgather=lambda each: [each, each, other])
    figures.check_memory("--sizes", 2 << 30, ranks)
    line = f"^--sizes: 2 ranks on {mine} would hold 6.0 GiB, and 5.0 are free; expected fewer bytes or ranks$"
    with pytest.raises(figures.Refused, match=line):
        figures.check_memory("--sizes", 3 << 30, ranks)


@pytest.mark.parametrize("absent", ("hpctrain", "numpy"))
def test_a_package_that_is_not_there_is_one_line(tmp_path, absent):
    script = (
        "import importlib.abc, importlib.util, runpy, sys\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {absent!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.argv = [sys.argv[1]]\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (tmp_path / "without.py").write_text(script)
    env = dict.fromkeys(("PMI_SIZE", "PMI_RANK", "PMI_FD", "HPCTRAIN_MPI"))
    result = run_python(tmp_path / "without.py", ROOT / "benchmarks/osu_latency.py", timeout=60, env=env)
    assert result.returncode == 2 and result.stdout == "", result
    assert re.fullmatch(f"osu_latency.py: {absent} is not installed; pip install .*\n", result.stderr), result


def test_flags_are_refused_before_torch_is_imported():
    """Which takes seconds, on every rank."""
    scripts = [str(ROOT / f"benchmarks/{name}.py") for name in PROGRAMS]
    look = "import runpy, sys; sys.path[:0] = sys.argv[1:3]; [runpy.run_path(each) for each in sys.argv[3:]]"
    folders = (ROOT / "benchmarks", ROOT / "benchmarks/peers")
    result = run_python("-c", f"{look}; print('torch' in sys.modules)", *folders, *scripts, timeout=60)
    assert result.stdout == "False\n", result


def test_a_package_that_only_measuring_needs_is_looked_for_first(figures, monkeypatch):
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="^torch is not installed; pip install torch$"):
        figures.check_packages(("torch",))


def test_without_mpi4py_a_launch_is_refused(figures, monkeypatch, capsys):
    monkeypatch.setattr(figures, "join_launch", failing("cannot start MPI: no mpi4py"))
    monkeypatch.setattr(figures.abort, "leave", sys.exit)
    with pytest.raises(SystemExit, match="^2$"):
        figures.join("some.py")
    assert capsys.readouterr().err == "some.py: cannot start MPI: no mpi4py\n"


def failing(words):
    def call():
        raise ValueError(words)

    return call
