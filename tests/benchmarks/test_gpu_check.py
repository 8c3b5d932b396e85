"""benchmarks/gpu_check.sh: a row for each part whatever becomes of it, and code 0 only where all ran.

On this machine, and with programs that answer as those of a machine with a GPU would.
"""

import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hpctrain.comm.devices import visible_devices
from tests.harness.launch import ROOT, run, run_python

SCRIPT = ROOT / "benchmarks/gpu_check.sh"
NEED_A_GPU = ["gpu", "gpu-test", "osu_bw --buffer cupy D D", "osu_bw --buffer cupy H D", "osu_allreduce ring, staged"]
NEED_A_GPU += ["osu_allreduce ring, direct", "osu_allreduce host, MPI_Allreduce", "osu_allreduce MPI_Allreduce"]
NEED_A_GPU += ["step, hpctrain / torch", "step bf16-mixed, hpctrain / torch"]
DIRECT = [NEED_A_GPU[2], NEED_A_GPU[3], NEED_A_GPU[5], NEED_A_GPU[7]]
OTHERS = ["versions", "MPI library", "doctor", "osu_bw H H"]
PROGRAM = r"""#!/bin/bash
# stands for Python, nvidia-smi, and mpirun, which starts what it is given
words="${0##*/} $*"
case "$words" in *"$BROKEN"*) [ -z "$BROKEN" ] || { echo "x.py: an error of ours" >&2; exit "$CODE"; } ;; esac
case "$words" in
    *visible_devices* | *"import cupy"*) ;;
    *"not verdict"*) exit "$UNAWARE" ;;
    *doctor*) printf 'torch   2\npath of gradients   direct: MPI takes device memory\n\nnothing to complain about\n' ;;
    *tests.gpu.machine*) ;;
    *suite.py*) echo "41 passed, 0 failed, 1 skipped" ;;
    *) printf '# Size     Title\n1048576    2.50\n16777216   100.00\n' ;;
esac
"""


def table(output: str) -> dict[str, str]:
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in output.splitlines() if re.search(r"\S {2,}\S", line))


@pytest.fixture
def machine(tmp_path):
    """One with a GPU, where the program whose words hold `broken` ends with `code`: exit code and rows."""
    for name in ("python3", "nvidia-smi", "mpirun"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)

    def check(broken="", code=1, unaware=0, *flags):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "python3", "BROKEN": broken, "CODE": code}
        result = run([SCRIPT, *map(str, flags)], timeout=60, env={**env, "UNAWARE": unaware})
        return result.returncode, table(result.stdout)

    return check


def test_bash_can_read_it_and_a_mistake_is_one_line():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    for argv in (["--fast"], ["--markdown", "/nowhere/t.md"]):
        result = run([SCRIPT, *argv], timeout=60)
        told = [line for line in result.stderr.splitlines() if line.startswith("gpu_check.sh: ")]
        assert result.returncode == 2 and result.stdout == "" and argv[-1] in told[0], result


def test_a_dry_run_only_prints_what_would_be_started(machine):
    code, rows = machine("", 1, 0, "--dry-run")
    assert code == 0 and list(rows) == [*NEED_A_GPU[:1], *OTHERS[:3], NEED_A_GPU[1], OTHERS[3], *NEED_A_GPU[2:]]
    limits = [int(re.match(r"timeout (\d+) ", command)[1]) for command in rows.values()]
    assert sum(limits) < 480
    for command in rows.values():
        for name in re.findall(r"(?:benchmarks|tests)/\S+\.py", command):
            assert (ROOT / name).is_file(), name


def test_every_part_that_ran_has_its_result(machine, tmp_path):
    code, rows = machine("", 1, 0, "--markdown", tmp_path / "t.md")
    assert code == 0 and {*NEED_A_GPU, *OTHERS} <= rows.keys()
    assert rows["doctor"] == "path of gradients: direct: MPI takes device memory; nothing to complain about"
    assert rows["gpu-test"] == "41 passed, 0 failed, 1 skipped"
    assert rows["osu_bw --buffer cupy D D"] == "100 MB/s at 16777216 bytes"
    assert rows["osu_allreduce ring, staged"] == "1048576 bytes 2.5 us, 16777216 bytes 100.0 us"
    written = (tmp_path / "t.md").read_text().splitlines()
    assert written[0] == "| part | result |" and written[2:] == [f"| {name} | {told} |" for name, told in rows.items()]


@pytest.mark.parametrize(
    "broken, code, told",
    [("suite.py", 1, "failed (code 1): x.py: an error of ours"), ("--algorithm host", 124, "failed: more than 15 s")],
)
def test_a_part_that_fails_has_a_row_that_says_so_and_the_others_run(machine, broken, code, told):
    result, rows = machine(broken, code)
    failed = [name for name, row in rows.items() if row == told]
    assert result == 1 and len(failed) == 1 and {*NEED_A_GPU, *OTHERS} <= rows.keys()
    assert not any("failed" in row for name, row in rows.items() if name not in failed and name != "gpu-test")


def test_an_mpi_that_takes_memory_of_the_host_only_is_an_answer(machine):
    code, rows = machine("", 1, 1)
    only = [name for name, row in rows.items() if row == "this MPI takes memory of the host only"]
    assert code == 0 and only == DIRECT


def test_without_a_gpu_what_needs_one_says_so(tmp_path):
    if not visible_devices()[1]:
        pytest.skip("this machine has a GPU")
    result = run(
        [SCRIPT, "--markdown", tmp_path / "t.md"], timeout=100, env={"PYTHON": sys.executable, "PATIENCE": "8"}
    )
    rows = table(result.stdout)
    assert result.returncode == 1, result
    assert [name for name, row in rows.items() if row == "no GPU"] == NEED_A_GPU
    assert all("failed" not in row for row in rows.values()) and rows["osu_bw H H"].endswith("at 16777216 bytes")
    assert len((tmp_path / "t.md").read_text().splitlines()) == 2 + len(rows)


# ---- peers/device_step.py


@pytest.fixture
def step(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    import device_step

    return device_step


SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 16, "rows": 4, "steps": 2, "pairs": 2, "json": None}


@pytest.mark.parametrize("precision", ("float32", "bf16-mixed"))
def test_both_sides_of_a_step_train_the_same(step, precision, capsys):
    result, fault = step.run(SimpleNamespace(**SMALL, device=None, precision=precision))
    assert fault is None and result["difference"] <= 1e-6, result
    assert all(seconds > 0 for pair in result["pairs"] for seconds in pair.values()) and len(result["pairs"]) == 2
    assert re.search(r"^hpctrain / torch: [\d.]+, with 50% from ", capsys.readouterr().out, re.MULTILINE)


def test_courses_of_losses_that_differ_or_end_are_apart(step):
    assert step.difference([1.0, 2.0], [1.0, 1.0]) == 1
    assert step.difference([1.0], [1.0, 2.0]) == math.inf == step.difference([math.nan], [1.0])


@pytest.mark.parametrize("argv, words", [("--steps 0", "--steps 0: expected"), ("--device gpu", "--device: invalid")])
def test_a_mistake_is_told_before_anything_runs(argv, words):
    result = run_python(ROOT / "benchmarks/peers/device_step.py", *argv.split(), timeout=60)
    assert result.returncode == 2 and result.stderr.startswith(f"device_step.py: {words}"), result
