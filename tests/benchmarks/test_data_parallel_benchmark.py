"""DataParallel beside DistributedDataParallel: what is printed and checked, and one launch."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, run_mpi

SCRIPT = ROOT / "benchmarks/peers/data_parallel.py"


@pytest.fixture(scope="module")
def peers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_row_stands_under_its_header(peers):
    row = peers.line(3, {"hpctrain": 0.6, "torch": 0.9, "alone": 0.5})
    assert row.split() == ["3", "600.0", "ms", "900.0", "ms", "500.0", "ms", "1.500"]
    assert len(row) == len(peers.HEADER)


@pytest.mark.parametrize(
    "model, ranks, torch, difference, words",
    [
        ("mlp", 2, 1.5, 0.0, []),
        ("mlp", 2, 1.3, 0.0, ["torch takes 1.300 times as long, at least 1.4 was asked for"]),
        ("mlp", 8, 1.5, 0.0, ["torch takes 1.500 times as long, at least 2.0 was asked for"]),
        ("gpt", 2, 0.9, 0.0, ["torch takes 0.900 times as long, at least 0.95 was asked for"]),
        ("gpt", 4, 0.5, 0.0, []),
        ("gpt", 4, 0.5, 1e-3, ["they differ by 1.0e-03"]),
    ],
)
def test_the_check(peers, model, ranks, torch, difference, words):
    result = {"difference": difference, "pairs": [{"hpctrain": 1.0, "torch": torch + add} for add in (-0.2, 0, 0.3)]}
    assert peers.faults(result, SimpleNamespace(model=model, check=True), ranks) == words
    if difference == 0:
        assert peers.faults(result, SimpleNamespace(model=model, check=False), ranks) == []


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 1, "one rank has nobody to sum with; start it by mpirun -n 2"),
        ("--rows 0", 2, "--rows 0: expected a whole number >= 1"),
        ("--model cnn", 2, "--model: invalid choice: 'cnn' (choose from 'gpt', 'mlp')"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(peers, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        peers.parse(argv.split(), ranks)


@pytest.mark.wide
def test_a_launch_writes_all_figures(tmp_path):
    argv = [
        sys.executable,
        SCRIPT,
        "--model",
        "gpt",
        "--pairs",
        "1",
        "--steps",
        "1",
        "--rows",
        "1",
        "--json",
        "found.json",
    ]
    result = run_mpi(2, argv, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result
    found = json.loads((tmp_path / "found.json").read_text())
    assert [sorted(pair) for pair in found["pairs"]] == [["alone", "hpctrain", "torch"]] and found["difference"] < 1e-5
