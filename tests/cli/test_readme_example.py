"""The program in README runs as it is written."""

import re
import sys

from tests.harness.launch import ROOT, run_mpi


def test_the_ring_example_sums_over_the_ranks(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "example.py").write_text(program)
    result = run_mpi(3, [sys.executable, tmp_path / "example.py"], timeout=60)
    assert result.returncode == 0, result
    assert sorted(result.stdout.splitlines()) == ["rank 0: 3.0", "rank 1: 3.0", "rank 2: 3.0"]
