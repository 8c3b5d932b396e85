"""Commands that the doctor starts, outside of the launch that this process may be part of."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import hpctrain

LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD", "PRTE_", "HYDI_")
LIMIT = 60  # seconds


def output(command: list[str], **variables: str) -> str:
    """What a command prints, with `variables` added to its environment. OSError, or an error of subprocess."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    root = str(Path(hpctrain.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    how = {"capture_output": True, "text": True, "check": True, "timeout": LIMIT}
    return subprocess.run(command, env={**env, **variables}, **how).stdout


def reason(error: Exception) -> str:
    """The last line that the failed process wrote, or what happened to it."""
    lines = (getattr(error, "stderr", None) or "").strip().splitlines()
    code = getattr(error, "returncode", 0)
    if code < 0:
        return f"it died of {signal.Signals(-code).name}; a bus error means too little /dev/shm"
    return lines[-1] if lines else str(error).splitlines()[0]
