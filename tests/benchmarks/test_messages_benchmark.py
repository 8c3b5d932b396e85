"""Messages beside a program in C: what is printed and checked, and one launch where there is a compiler."""

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, launcher_env, mpirun, run

SCRIPT = ROOT / "benchmarks/peers/messages.py"


@pytest.fixture(scope="module")
def messages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def found(latency=1.5, bandwidth=5000.0):
    more = [{"python": latency + add, "c": 1.0} for add in (-0.2, 0.0, 0.2)]
    shares = [{"python": bandwidth + add, "c": 5000.0} for add in (-500, 0, 500)]
    return {"latency": [{"bytes": 8, "pairs": more}], "bw": [{"bytes": 65536, "pairs": shares}]}


def test_a_row_stands_under_its_header(messages):
    rows = found()
    first, second = messages.line("latency", rows["latency"][0]), messages.line("bw", rows["bw"][0])
    assert " ".join(first.split()) == "latency 8 1.50 us 1.00 us +0.50 us 75% from 0.30 to 0.70"
    assert " ".join(second.split()) == "bw 65536 5000.00 MB/s 5000.00 MB/s 100.0% 75% from 0.90 to 1.10"
    assert messages.HEADER.index("   interval") == first.index("   75%") == second.index("   75%")


def test_the_check(messages):
    assert messages.faults(found()) == []
    told = messages.faults(found(latency=2.5, bandwidth=4000.0))
    assert told[0].startswith("latency of 8 bytes: 1.50 us more than C")
    assert told[1].startswith("bandwidth of 65536 bytes: 80.0% of that of C")


@pytest.mark.parametrize(
    "argv, line",
    [("--pairs 0", "--pairs 0: expected a whole number >= 1"), ("--divide no", "--divide: invalid int value: 'no'")],
)
def test_a_mistake_is_one_line_that_names_the_flag(messages, argv, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        messages.parse(argv.split())


@pytest.mark.parametrize(
    "script, why",
    [
        ("echo unrecognized argument x >&2; echo last >&2; exit 3", "exit code 3: unrecognized argument x"),
        ("echo first; echo last; exit 1", "exit code 1: last"),
        ("exit 1", "exit code 1: nothing said"),
        ("echo hello", "no figures: hello"),
        ("echo 8 1.5", "no figures: 8 1.5"),
    ],
)
def test_what_the_launcher_said_is_told_in_one_line(messages, tmp_path, script, why):
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(0o755)
    line = f"--launch '{launcher} -n': osu_bw.py on 2 ranks: {why}"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        messages.by_python(SimpleNamespace(launch=f"{launcher} -n", divide=1), "bw")
    with pytest.raises(ValueError, match=f"^{re.escape(line.replace('osu_bw.py', 'messages'))}$"):
        messages.by_c(SimpleNamespace(launch=f"{launcher} -n", divide=1), "bw", Path("messages"))


def test_figures_are_found_among_other_words(messages):
    flags = SimpleNamespace(launch="printf 'a warning\n# Size us\n4 1.0\n8 2.5\n'; true")
    assert messages.launch(flags, Path("x"), ["x"], (8,)) == {8: 2.5}


@pytest.mark.parametrize("rank", ("0", "1"))
def test_under_a_launcher_it_is_refused_by_each(messages, monkeypatch, capsys, rank):
    """The launcher may end the others as soon as one has ended."""
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.delenv("HPCTRAIN_MPI", raising=False)
    assert messages.main([]) == 2
    line = "messages.py: mpirun of MPICH started this, which starts its own ranks: start it as python messages.py\n"
    assert capsys.readouterr().err == line


def test_without_a_compiler_it_is_said_in_one_line(messages, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert messages.main([]) == 2
    assert capsys.readouterr().err == "messages.py: there is no mpicc in PATH; load the MPI that mpi4py uses\n"


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_both_are_launched_in_turns(tmp_path):
    launcher = " ".join(map(str, (*mpirun(), "-n")))
    argv = [sys.executable, SCRIPT, "--pairs", "1", "--divide", "100", "--launch", launcher, "--json", "found.json"]
    env = {**launcher_env(), "PATH": f"{Path(mpirun()[0]).parent}:{os.environ['PATH']}"}
    result = run(argv, cwd=tmp_path, env=env, timeout=120)
    assert result.returncode == 0, result
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [row["bytes"] for row in rows["bw"]] == [65536, 262144, 1048576, 4194304]
    assert all(pair["c"] > 0 and pair["python"] > 0 for row in rows["bw"] + rows["latency"] for pair in row["pairs"])
