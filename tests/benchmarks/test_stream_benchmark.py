"""An all-reduce beside plain TCP: what is printed and checked, and one launch."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, run_mpi

SCRIPT = ROOT / "benchmarks/peers/stream.py"


@pytest.fixture(scope="module")
def peers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_row_stands_under_its_header(peers):
    row = peers.line(3, {"all-reduce": 0.9, "stream": 0.6})
    assert row.split() == ["3", "900.0", "ms", "600.0", "ms", "1.500"]
    assert len(row) == len(peers.HEADER)


@pytest.mark.parametrize(
    "ring, checks, words",
    [
        (0.6, True, []),
        (0.75, True, ["the all-reduce takes 1.25 times as long as the streams, not 1.2"]),
        (0.75, False, []),
    ],
)
def test_the_check_is_of_the_median(peers, ring, checks, words):
    told, median = peers.summary([{"all-reduce": ring + add, "stream": 0.6} for add in (-0.15, 0.0, 0.3)])
    assert told.startswith(f"all-reduce / stream: {ring / 0.6:.3f}, with 75% from")
    assert peers.faults(median, checks) == words


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 1, "one rank has no neighbour; start it by mpirun -n 2"),
        ("--pairs 0", 2, "--pairs 0: expected a whole number >= 1"),
        ("--bytes 6", 2, "--bytes 6: expected a multiple of 4"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(peers, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        peers.parse(argv.split(), ranks)


def test_ranks_of_one_host_count_as_hosts(peers):
    assert [peers.per_host(names) for names in (["a"] * 3, ["a", "a", "b", "b"], ["a", "b"])] == [1, 2, 1]


@pytest.mark.wide
def test_a_launch_writes_all_figures(tmp_path):
    argv = [sys.executable, SCRIPT, "--pairs", "2", "--bytes", "4000000", "--json", "found.json"]
    result = run_mpi(3, argv, timeout=90, cwd=tmp_path)
    assert result.returncode == 0, result
    found = json.loads((tmp_path / "found.json").read_text())
    assert [sorted(pair) for pair in found["pairs"]] == [["all-reduce", "stream"]] * 2
    assert "all-reduce / stream: " in result.stdout
