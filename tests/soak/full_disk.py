"""`python -m tests.soak.full_disk --faults 50 --seed 1`: the disk is full, or read-only, while a run saves.

The checkpoints of a run lie on a small file system of their own, in a namespace that nobody else sees, so it needs
Linux, and root or namespaces of users. At a random save it is filled up to a random rest, or made read-only, before or
in the middle; some runs are asked to stop at that moment. The run goes on, or ends in one line, what was saved before
stays whole, and with room again `--resume auto` has the bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

from tests.harness.launch import ROOT, Result, launcher_env, mpirun, run

LIMIT = 60  # seconds for the launch, and for each fault
ALONE = ("unshare", *(() if os.getuid() == 0 else ("--map-root-user",)), "--mount", "--propagation", "private")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def lacking() -> str | None:
    """Why it cannot be done here."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "needs unshare, of Linux"
    with tempfile.TemporaryDirectory() as folder:
        both = 'mount -t tmpfs -o size=64k none "$1" && mount -o remount,ro "$1"'
        tried = subprocess.run([*ALONE, "sh", "-c", both, "sh", folder], capture_output=True, text=True)
    return f"no namespace of mounts here: {' '.join(tried.stderr.split())}" if tried.returncode else None


def faults(number: int, seed: int, ranks: int = 2) -> Result:
    """All of them in one launch."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, ROOT / "tests/soak/full_disk_ranks.py", folder, number, seed]
        command = [*ALONE, *mpirun(), "-n", ranks, *argv]
        return run([str(each) for each in command], timeout=LIMIT * (2 + number), env=launcher_env() | AS_ROOT)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.full_disk", description=__doc__)
    for flag, default in (("--faults", 50), ("--ranks", 2), ("--seed", 1)):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")
    flags = parser.parse_args(argv)
    if why := lacking():
        print(f"python -m tests.soak.full_disk: {why}", file=sys.stderr)
        return 2
    result = faults(flags.faults, flags.seed, flags.ranks)
    print(result if result.returncode else json.dumps(json.loads(result.stdout.splitlines()[-1])))
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
