"""Emulated hosts go when their maker does, however it ends; a machine that cannot have them says what would help."""

import os
import shutil

import pytest

from tests.harness.launch import run_python
from tests.hosts import emulated

PROGRAM = """
import os, signal, subprocess
from tests.hosts.emulated import hosts

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored
with hosts(2) as cluster:
    command = cluster.command(1, ["sh", "-c", "echo up; sleep 1000"])
    ranks = subprocess.Popen(command, env={{**os.environ, **cluster.environment}}, stdout=subprocess.PIPE)
    print(ranks.stdout.readline(), ranks.stdout.readline(), flush=True)
    {end}
"""
ENDS = {"interrupt": "raise KeyboardInterrupt", "exit": "raise SystemExit(1)"}
ENDS |= {name: f"os.kill(os.getpid(), signal.{name})" for name in ("SIGINT", "SIGTERM", "SIGKILL")}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_nothing_is_left_however_we_end(end, tmp_path):
    networks = os.listdir("/sys/class/net")
    result = run_python("-c", PROGRAM.format(end=end), timeout=60, env={"TMPDIR": tmp_path})  # sees to processes
    assert result.returncode != 0 and result.stdout.count("up") == 2, result
    assert os.listdir(tmp_path) == []
    assert os.listdir("/sys/class/net") == networks


@pytest.mark.parametrize(
    "tool, root, line",
    [
        ("tc", True, "emulated hosts need tc: apt install iproute2"),
        ("", False, "emulated hosts need root, for namespaces of their own: sudo make hosts-test"),
    ],
)
def test_a_machine_that_cannot_says_what_would_help(tool, root, line, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else f"/bin/{name}")
    monkeypatch.setattr(os, "getuid", lambda: 0 if root else 1000)
    assert emulated.missing() == line


def test_a_rate_that_tc_does_not_know_is_said():
    with pytest.raises(RuntimeError, match="no hosts here .*rate"), emulated.hosts(1, rate="fast"):
        pass
