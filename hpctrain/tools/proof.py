"""`doctor --prove`: whether MPI takes device memory, by two ranks that try it in a job of their own.

Layers may say yes and be wrong; then the job ends by a segmentation fault, and the doctor tells it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from hpctrain.comm.environment import vendor
from hpctrain.tools import outside

TRANSFER = [sys.executable, "-c", "from hpctrain.tools.transfer import main; main()"]
ENDS = {  # what an mpirun or a rank writes, and what it means
    "Segmentation fault": "a rank ended by a segmentation fault",
    "elements are wrong": "elements arrived that are wrong",
    "Alarm clock": "the ranks waited without an end",
}

Proof = tuple["bool | None", str]  # whether it succeeded (None: it was not made), and why


def prove(gpu: dict, mpi: dict) -> Proof:
    """`gpu`: facts of this process, by gpus.gpu_facts; `mpi`: those of doctor.mpi_alone."""
    if not gpu["devices"]:
        return None, f"not made: {gpu['no_device']}"
    if gpu["torch_devices"] != len(gpu["devices"]):
        return None, "not made: torch does not see the devices"
    if mpi["library"] is None or mpi["mpirun"] is None:
        return None, "not made: no MPI, or no mpirun"
    if mpi["mpirun_vendor"] != vendor(mpi["library"]):
        return None, "not made: mpirun is of another MPI than mpi4py's"
    return transfer(mpi["mpirun"], mpi["mpirun_vendor"])


def transfer(mpirun: str, of_vendor: str, program: list[str] = TRANSFER) -> Proof:
    """What comes of two ranks of `program`, on this host."""
    openmpi = of_vendor == "Open MPI"
    as_root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") if openmpi and os.getuid() == 0 else ()
    command = [mpirun, *["--oversubscribe"] * openmpi, "-n", "2", *program]
    try:
        outside.output(command, **dict.fromkeys(as_root, "1"))
    except subprocess.CalledProcessError as error:
        written = f"{error.stdout}\n{error.stderr}"
        end = next((meaning for words, meaning in ENDS.items() if words in written), None)
        raised = [line for line in written.splitlines() if "Error" in line]  # mpirun has a word after it
        return (False, end) if end else (None, f"not made: {raised[-1] if raised else outside.reason(error)}")
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"not made: {outside.reason(error)}"
    return True, "two ranks of this host exchanged device memory, and every element arrived"
