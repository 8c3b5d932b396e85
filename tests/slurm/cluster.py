"""A Slurm of its own on this machine, with several nodes: for job scripts that must be seen to work under the real one.

    with slurm(3) as cluster:
        job = cluster.submit("--nodes", "2", "--", "--steps", "3")
        cluster.wait(job, "COMPLETED", timeout=60)

`python -m tests.slurm.cluster` says what this machine lacks. Every node is a slurmd on the loopback address that claims
some cores; nothing is pinned, counted or kept. All processes live in a namespace of process numbers, whose first one
reads from a pipe that we hold: when we end, however that comes, the kernel ends them all.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.launch import ROOT, Result, launcher_env, mpirun, vendor
from tests.slurm.settings import CGROUP, slurm_conf

TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
TOOLS |= {"unshare": "util-linux", "nsenter": "util-linux"}
SYSTEM = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # where daemons are
READY = "ready"
# the first process of the namespace: takes in orphans, which would stay as zombies and look alive to Slurm
KEEPER = f"""
import os, select, shutil, sys
print("{READY}", flush=True)
while not select.select([sys.stdin], [], [], 0.1)[0]:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
MPI_OF_SRUN = {"MPICH": "pmi2", "Open MPI": "pmix"}


@dataclass(frozen=True)
class Slurm:
    """Nodes n1, n2 and so on. `folder` is that of the daemons, `work` the one that jobs are submitted from."""

    nodes: list[str]
    folder: Path
    work: Path
    keeper: int

    @property
    def environment(self) -> dict[str, str]:
        return {**launcher_env(), "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SYSTEM}

    def run(self, *command, timeout: float = 60) -> Result:
        """Any command, in the namespace, from the folder `work`. AssertionError when `timeout` (seconds) is over."""
        begin = time.monotonic()
        try:
            done = subprocess.run(self._inside(command), capture_output=True, timeout=timeout, **self._place())
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"more than {timeout:g} s: {error.cmd}\n{error.stdout}\n{error.stderr}") from None
        return Result(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)

    def say(self, *command, timeout: float = 60) -> str:
        """What a command prints that must not fail."""
        result = self.run(*command, timeout=timeout)
        assert result.returncode == 0, result
        return result.stdout.strip()

    def begin(self, *daemon) -> None:
        """A program that goes into the background by itself."""
        with (self.folder / "begin.log").open("w") as log:
            subprocess.run(self._inside(daemon), stdout=log, stderr=log, check=True, timeout=60, **self._place())

    def _inside(self, command) -> list[str]:
        inside = [f"--target={self.keeper}", "--mount", f"--pid=/proc/{self.keeper}/ns/pid_for_children"]
        return ["nsenter", *inside, f"--wd={self.work}", "--", *map(str, command)]

    def _place(self) -> dict[str, Any]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **self.environment, "PYTHONPATH": path}
        return {"env": env, "stdin": subprocess.DEVNULL, "text": True}

    def submit(self, *argv) -> str:
        """The number of the job that `hpctrain submit` makes of `argv`."""
        said = self.say(sys.executable, "-m", "hpctrain", "submit", *argv)
        assert said.startswith("Submitted batch job "), said
        return said.split()[-1]

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of it."""
        words = self.say("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, state: str, timeout: float) -> dict[str, str]:
        """Waits for the job to be in that state; AssertionError, with its log, where it ends in another."""
        return self.until(job, lambda told: told["JobState"] == state, state, timeout)

    def until(self, job: str, holds, what: str, timeout: float) -> dict[str, str]:
        deadline = time.monotonic() + timeout
        while not holds(told := self.job(job)):
            late = time.monotonic() > deadline
            assert not late and told["JobState"] not in ENDED, f"not {what}: {told}\n{self.log(job)}"
            time.sleep(0.3)
        return told

    def log(self, job: str) -> str:
        """What the job printed so far."""
        path = self.work / f"hpctrain-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, node: str) -> None:
        """Its slurmd."""
        for place in ("spool", "tmp"):
            (self.folder / place / node).mkdir(parents=True, exist_ok=True)
        self.begin("slurmd", "-N", node)

    def kill(self, node: str) -> None:
        """Its slurmd, at once and without a word."""
        self.say("kill", "-9", (self.folder / f"slurmd-{node}.pid").read_text().strip())

    def commands(self) -> list[str]:
        """Of all processes of ours."""
        return self.say("ps", "-e", "-o", "args=").splitlines()


@contextmanager
def slurm(number: int, cpus: int = 16) -> Iterator[Slurm]:
    """So many nodes that claim so many cores. RuntimeError, one line, where this cannot be."""
    if fault := missing():
        raise RuntimeError(fault)
    with tempfile.TemporaryDirectory(prefix="hpctrain-slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # munge wants to be reached by everybody
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # a session of its own: an interrupt from the terminal is for us, who tidy up
        keeper = subprocess.Popen(
            [*command, sys.executable, "-c", KEEPER, str(folder)], start_new_session=True, **pipes
        )
        try:
            told = keeper.stdout.readline().strip()
            if told != READY:
                raise RuntimeError(f"no Slurm here (in a container it needs --privileged): {told}")
            yield _started(folder, [f"n{index}" for index in range(1, number + 1)], cpus, keeper.pid)
        finally:
            keeper.stdin.close()
            keeper.wait()
            keeper.stdout.close()


def missing() -> str:
    """What is missing for a Slurm here and how to get it, in one line; empty: nothing."""
    if lacking := [tool for tool in TOOLS if not shutil.which(tool, path=SYSTEM)]:
        packages = " ".join(dict.fromkeys(TOOLS[tool] for tool in lacking))
        return f"a Slurm of our own needs {', '.join(lacking)}: apt install {packages}"
    return "" if os.getuid() == 0 else "a Slurm of our own needs root, for a namespace of its own: sudo make slurm-test"


def _started(folder: Path, nodes: list[str], cpus: int, keeper: int) -> Slurm:
    cluster = Slurm(nodes, folder, folder / "work", keeper)
    (cluster.work / "jobs").mkdir(parents=True)
    environment = (ROOT / "jobs/env.sh").read_text().replace("source .venv/bin/activate", _activated())
    mpi = MPI_OF_SRUN[vendor(mpirun()[0])]
    (cluster.work / "jobs/env.sh").write_text(environment.replace("SRUN_MPI=pmi2", f"SRUN_MPI={mpi}"))
    (folder / "slurm.conf").write_text(slurm_conf(folder, nodes, cpus, _free_ports(len(nodes) + 1)))
    (folder / "cgroup.conf").write_text(CGROUP)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    cluster.begin("munged", *(f"--{option}={folder}/munge.{name}" for option, name in places.items()))
    cluster.begin("slurmctld")
    for node in nodes:
        cluster.start(node)
    deadline = time.monotonic() + 60
    while (
        "idle" not in (said := cluster.run("sinfo", "--noheader", "--format=%T").stdout.split()) or len(set(said)) > 1
    ):
        assert time.monotonic() < deadline, f"nodes are {said}, see {folder}"
        time.sleep(0.2)
    cluster.say("srun", f"--nodes={len(nodes)}", "true")
    return cluster


def _activated() -> str:
    return f'export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{ROOT}"'


def _free_ports(number: int) -> list[int]:
    """That nobody listens on just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    sys.exit(missing() or 0)
