"""All-reduce beside MPI_Allreduce and gloo: what is printed and checked, and one launch."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, run_mpi

SCRIPT = ROOT / "benchmarks/peers/allreduce.py"


@pytest.fixture(scope="module")
def peers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def row(nbytes=64 << 20, mpi=0.2, wrong=None):
    pairs = [{"windows": 0.04, "ring": 0.1, "mpi": mpi + add, "gloo": 0.4} for add in (-0.05, 0.0, 0.05)]
    return {"bytes": nbytes, "wrong": wrong or {}, "pairs": pairs}


def test_a_row_stands_under_its_header(peers):
    words = " ".join(peers.line(row()).split())
    assert words == "67108864 40000 us 100000 us 200000 us 400000 us 5.00 10.00 2.00 75% from 3.75 to 6.25"
    assert peers.HEADER.index("   interval") == peers.line(row()).index("   75%")
    assert peers.line(row(wrong={"gloo": 3})) == "  67108864  wrong elements: {'gloo': 3}"


RING = "MPI_Allreduce takes 1.50 times as long as ring, not 1.8"
WINDOWS = "the faster of MPI_Allreduce and gloo takes {} times as long as windows, not {}"


@pytest.mark.parametrize(
    "rows, checks, words",
    [
        ([row()], True, []),
        ([row(mpi=0.15)], True, [f"67108864 bytes: {RING}"]),
        ([row(mpi=0.15)], False, []),
        ([row(1 << 20, mpi=0.112)], True, ["1048576 bytes: " + WINDOWS.format("2.80", "3.0")]),
        ([row(16 << 20, mpi=0.112)], True, []),
        ([row(65536, mpi=0.05)], True, []),
        ([row(65536, mpi=0.032)], True, ["65536 bytes: " + WINDOWS.format("0.80", "1.0")]),
        ([row(4096, mpi=0.036)], True, []),
        ([row(4096, mpi=0.032)], True, ["4096 bytes: " + WINDOWS.format("0.80", "0.85")]),
        ([row(4096, wrong={"ring": 1})], False, ["4096 bytes: wrong elements: {'ring': 1}"]),
    ],
)
def test_the_check(peers, rows, checks, words):
    assert peers.faults(rows, 4, checks) == words


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 1, "one rank adds nothing up; start it by mpirun -n 2"),
        ("--pairs 0", 2, "--pairs 0: expected a whole number >= 1"),
        ("--sizes 4096,6", 2, "--sizes 4096,6: expected multiples of 4, such as 4096,65536"),
        ("--sizes few", 2, "--sizes few: expected multiples of 4, such as 4096,65536"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(peers, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        peers.parse(argv.split(), ranks)


def test_a_launch_writes_all_figures(tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--pairs", "2", "--sizes", "4096,300000", "--json", "found.json", "--plot", "found.png"]
    argv = [sys.executable, SCRIPT, *flags]
    result = run_mpi(2, argv, timeout=90, cwd=tmp_path)
    assert result.returncode == 0, result
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [each["bytes"] for each in rows] == [4096, 300000]
    assert all(len(each["pairs"]) == 2 and not each["wrong"] for each in rows)
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
