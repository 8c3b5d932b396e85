"""Compressed sums beside plain ones: what is printed, what is refused, and one launch."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, run_mpi

SCRIPT = ROOT / "benchmarks/compressed_sums.py"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_row_stands_under_its_header(script):
    row = script.line(1 << 20, [{"none": 0.02, "bf16": seconds} for seconds in (0.012, 0.01, 0.018)])
    assert row.split() == ["1048576", "20.00", "ms", "12.00", "ms", "0.60", "75%", "from", "0.50", "to", "0.90"]
    assert len(row) == len(script.HEADER)


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 1, "one rank sends nothing; start it by mpirun -n 2"),
        ("--pairs 0", 2, "--pairs 0: expected a whole number >= 1"),
        ("--bytes 8 6", 2, "--bytes 8 6: expected multiples of 4"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(script, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        script.parse(argv.split(), ranks)


def test_arrays_that_memory_cannot_hold_are_refused(tmp_path):
    result = run_mpi(2, [sys.executable, SCRIPT, "--bytes", str(1 << 46)], timeout=60, cwd=tmp_path)
    assert result.returncode == 2 and "compressed_sums.py: --bytes: 2 ranks on" in result.stderr


def test_a_launch_writes_all_figures(tmp_path):
    argv = [sys.executable, SCRIPT, "--pairs", "2", "--bytes", "40000", "4000000", "--json", "found.json"]
    result = run_mpi(3, argv, timeout=90, cwd=tmp_path)
    assert result.returncode == 0, result
    found = json.loads((tmp_path / "found.json").read_text())
    assert {size: [sorted(pair) for pair in pairs] for size, pairs in found["pairs"].items()} == {
        "40000": [["bf16", "none"]] * 2,
        "4000000": [["bf16", "none"]] * 2,
    }
