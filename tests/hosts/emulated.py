"""Several hosts on one machine, joined by links of a known rate: for what must be seen to work over a network.

    with hosts(4) as cluster:
        cluster.run_mpi(2, [sys.executable, "program.py"], timeout=60)    # 2 ranks on each

or `python -m tests.hosts.emulated 4 2 python program.py`; without arguments it says what this machine lacks.

A host is a set of Linux namespaces: a network, a name, System V IPC, and mounts, with a /dev/shm, a /sys and an
/etc/hosts of its own. Files and process numbers are common to all, as if they mounted the same disk. The switch, a
bridge, has a network of its own too, so that nothing here touches the machine's. Between hosts everything is TCP.

All of it lives in one namespace of process numbers, whose first process reads from a pipe that we hold. When we end,
however that comes, it ends, and the kernel ends all others and takes the networks down. So nothing can stay behind.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness.launch import ROOT, Result, launcher_env, mpirun, run, vendor

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
READY = "ready"
# of what leaves a host, and of what the switch sends it; the queue holds all that a few connections have under way
LIMIT = "root tbf rate {rate} burst 128kb latency 100ms"

SWITCH = """
mount --bind {folder}/hosts /etc/hosts
ip link add switch type bridge
ip link set switch up
"""
HOST = """
keeper=$(unshare --net --uts --ipc --mount sh -ec {inside})
echo $keeper >{folder}/{name}
ip link add {name} type veth peer name eth0 netns $keeper
ip link set {name} master switch up
tc qdisc add dev {name} {limit}
nsenter --target $keeper --net sh -ec {network}
"""
INSIDE = """
echo {name} >/proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t sysfs sysfs /sys
sleep infinity >/dev/null 2>&1 &
echo $!
"""
NETWORK = """
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
tc qdisc add dev eth0 {limit}
"""
# as mpirun calls ssh: options, a host, the words of a command; {folder} has the process that keeps each host
SSH = """#!/bin/sh -e
while case $1 in -*) ;; *) false ;; esac; do shift; done
keeper=$(cat {folder}/$1); shift
exec nsenter --target $keeper --net --uts --ipc --mount -- sh -c "$*"
"""
FREEZE = """
network=$(readlink /proc/$(cat {keeper})/ns/net)
for process in /proc/[0-9]*; do
  if [ "$(readlink $process/ns/net)" = "$network" ]; then kill -STOP "${{process#/proc/}}"; fi
done
"""
# TCP also between processes that share a kernel, and by no other way; hosts that share cores
ONLY_TCP = {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp", "OMPI_MCA_mpi_yield_when_idle": "1"}


@dataclass(frozen=True)
class Hosts:
    """`number` hosts, named host1 and so on; `switch` is a process in the namespaces of the switch."""

    number: int
    folder: Path
    switch: int

    @property
    def names(self) -> list[str]:
        return names(self.number)

    @property
    def environment(self) -> dict[str, str]:
        """What must be in the environment of mpirun. Temporary files go when the hosts go."""
        return {**launcher_env(), **ONLY_TCP, "TMPDIR": str(self.folder)}

    def command(self, per_host: int, argv, cwd=ROOT) -> list[str]:
        """Starts `argv` from host1, in the folder `cwd`, on so many ranks a host, consecutive ones."""
        program, *flags = mpirun()
        ssh, slots = str(self.folder / "ssh"), ",".join(f"{name}:{per_host}" for name in self.names)
        if vendor(program) == "Open MPI":
            flags += ["--prtemca", "plm_ssh_agent", ssh, "--bind-to", "none", "--host", slots]
        else:
            flags += ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", slots]
        launch = shlex.join([program, *flags, "-n", str(per_host * self.number), *map(str, argv)])
        inside = [f"--target={self.switch}", "--mount", f"--pid=/proc/{self.switch}/ns/pid_for_children"]
        return ["nsenter", *inside, "--", ssh, self.names[0], f"cd {shlex.quote(str(cwd))} && {launch}"]

    def run_mpi(self, per_host: int, argv, *, timeout: float, env=None, cwd=ROOT) -> Result:
        """Runs that command; otherwise as run_mpi of tests.harness.launch."""
        command = self.command(per_host, argv, cwd)
        return run(command, timeout=timeout, env={**self.environment, **(env or {})})

    def cut(self, name: str) -> None:
        """Nothing reaches this host or leaves it, until it is healed."""
        self._at_switch("ip", "link", "set", name, "down")

    def heal(self, name: str) -> None:
        self._at_switch("ip", "link", "set", name, "up")

    def freeze(self, name: str) -> None:
        """This host is gone as seen from the others: its link is down, and nothing that runs there, or speaks for it to
        the launcher, ever says a word again."""
        self.cut(name)
        self._at_switch("sh", "-c", FREEZE.format(keeper=shlex.quote(str(self.folder / name))))

    def _at_switch(self, *command: str) -> None:
        inside = ["--net", "--mount", f"--pid=/proc/{self.switch}/ns/pid_for_children"]
        subprocess.run(["nsenter", f"--target={self.switch}", *inside, "--", *command], check=True)


@contextmanager
def hosts(number: int, rate: str = "1gbit") -> Iterator[Hosts]:
    """So many hosts; `rate` of each link, both ways, as tc writes it. RuntimeError, one line, where this cannot be."""
    if fault := missing():
        raise RuntimeError(fault)
    with tempfile.TemporaryDirectory(prefix="hpctrain-hosts-") as name:
        folder = Path(name)
        script = _prepare(folder, number, rate)
        command = ["unshare", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--mount", "--mount-proc"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # a session of its own: an interrupt from the terminal is for us, who tidy up
        switch = subprocess.Popen([*command, "sh", "-ec", script], start_new_session=True, **pipes)
        try:
            told = switch.stdout.readline().strip()
            if told != READY:
                raise RuntimeError(f"no hosts here (in a container they need --privileged): {told}")
            yield Hosts(number, folder, switch.pid)
        finally:
            switch.stdin.close()
            switch.wait()
            switch.stdout.close()


def missing() -> str:
    """What is missing for hosts here and how to get it, in one line; empty: nothing."""
    if lacking := [tool for tool in TOOLS if not shutil.which(tool)]:
        packages = " ".join(dict.fromkeys(TOOLS[tool] for tool in lacking))
        return f"emulated hosts need {', '.join(lacking)}: apt install {packages}"
    return "" if os.getuid() == 0 else "emulated hosts need root, for namespaces of their own: sudo make hosts-test"


def names(number: int) -> list[str]:
    return [f"host{index}" for index in range(1, number + 1)]


def _prepare(folder: Path, number: int, rate: str) -> str:
    """Writes the files that hosts need; the script of the first process."""
    addresses = {name: f"10.0.0.{index}" for index, name in enumerate(names(number), start=1)}
    lines = [f"{address} {name}" for name, address in {"localhost": "127.0.0.1", **addresses}.items()]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    place, limit = shlex.quote(str(folder)), LIMIT.format(rate=shlex.quote(rate))
    (folder / "ssh").write_text(SSH.format(folder=place))
    (folder / "ssh").chmod(0o755)
    script = SWITCH.format(folder=place)
    for name, address in addresses.items():
        inside, network = INSIDE.format(name=name), NETWORK.format(address=address, limit=limit)
        parts = {"inside": shlex.quote(inside), "network": shlex.quote(network)}
        script += HOST.format(name=name, folder=place, limit=limit, **parts)
    return script + f"echo {READY}\nread end || rm -rf {place}\n"


def main(argv: list[str]) -> int | str:
    """The exit code; without arguments of nothing, on one host."""
    number, per_host, *command = argv or ["1", "1", "true"]
    try:
        with hosts(int(number)) as cluster:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **cluster.environment}
            return subprocess.run(cluster.command(int(per_host), command, Path.cwd()), env=environment).returncode
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
