"""A Slurm of our own goes when its maker does, however it ends; a machine that cannot have one says what would help."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.harness.launch import run_python
from tests.slurm import cluster as clusters

PROGRAM = """
import os, signal
from tests.slurm.cluster import slurm

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored
with slurm(1) as cluster:
    job = cluster.say("sbatch", "--parsable", "--wrap", "echo up; sleep 1000")
    while not (cluster.work / f"slurm-{{job}}.out").exists():
        pass
    print("up", flush=True)
    {end}
"""
ENDS = {"exit": "raise SystemExit(1)"}
ENDS |= {name: f"os.kill(os.getpid(), signal.{name})" for name in ("SIGINT", "SIGTERM", "SIGKILL")}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_nothing_is_left_however_we_end(end):
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    try:
        result = run_python("-c", PROGRAM.format(end=end), timeout=60, env={"TMPDIR": place})  # sees to processes
        assert result.returncode != 0 and result.stdout == "up\n", result
        assert os.listdir(place) == []
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize(
    "tool, root, line",
    [
        ("slurmd", True, "a Slurm of our own needs slurmd: apt install slurmd"),
        ("munged", True, "a Slurm of our own needs munged: apt install munge"),
        ("", False, "a Slurm of our own needs root, for a namespace of its own: sudo make slurm-test"),
    ],
)
def test_a_machine_that_cannot_says_what_would_help(tool, root, line, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name == tool else f"/bin/{name}")
    monkeypatch.setattr(os, "getuid", lambda: 0 if root else 1000)
    assert clusters.missing() == line
