"""How long checkpoints keep training waiting: what is refused, and one launch."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, run_mpi

SCRIPT = ROOT / "benchmarks/checkpoint.py"


@pytest.mark.parametrize("flag", ["--mebibytes", "--turns"])
def test_a_mistake_is_one_line_that_names_the_flag(flag):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        script = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    with pytest.raises(ValueError, match=f"^{re.escape(flag)} 0: expected a whole number >= 1$"):
        script.parse([flag, "0"], 2)


@pytest.mark.wide
def test_all_sides_are_measured_and_nothing_is_left(tmp_path):
    flags = ["--mebibytes", "3", "--turns", "2", "--folder", tmp_path, "--json", tmp_path / "figures.json"]
    result = run_mpi(2, [sys.executable, SCRIPT, *flags], timeout=120)
    assert result.returncode == 0, result
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (
        all(set(each) == {"copy", "async", "whole", "sync"} for each in figures["turns"]) and len(figures["turns"]) == 2
    )
    assert figures["bytes"] >= 3 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert re.search(r"^async / copy \d+\.\d\d, ", result.stdout, re.MULTILINE), result
