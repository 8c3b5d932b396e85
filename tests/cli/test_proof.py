"""The doctor's proof: a job of its own ends as its MPI has it, and the doctor is told how."""

import json
import sys
from pathlib import Path

import pytest

from hpctrain.tools.proof import prove
from tests.harness.launch import mpirun, run_python, vendor
from tests.tools.gpu_facts import TWO_GPUS
from tests.tools.test_doctor import MPI

TRANSFERS = Path(__file__).with_name("transfers.py")
PROGRAM = """import json, sys
from hpctrain.tools.proof import transfer
print(json.dumps(transfer(*sys.argv[1:3], sys.argv[3:])))"""
READY = {**MPI, "mpirun_vendor": "MPICH"}
ARRIVED = [True, "two ranks of this host exchanged device memory, and every element arrived"]
PROOFS = {
    "host": ARRIVED,
    "pretended": ARRIVED,
    "unmapped": [False, "a rank ended by a segmentation fault"],
    "lost": [False, "elements arrived that are wrong"],
    "stuck": [False, "the ranks waited without an end"],
}


def told(*program):
    command = mpirun()[0]
    result = run_python("-c", PROGRAM, command, vendor(command), *program, timeout=60)
    assert result.returncode == 0 and not result.stderr, result
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", PROOFS)
def test_a_proof_ends_as_the_transfer_does(kind):
    """`unmapped` is what memory of a device is to an MPI that is not CUDA-aware."""
    assert told(sys.executable, TRANSFERS, kind) == PROOFS[kind]


def test_what_could_not_be_tried_is_no_proof(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_like_it")
    missing = "not made: ModuleNotFoundError: No module named 'nothing_like_it'"
    assert told(sys.executable, tmp_path / "broken.py") == [None, missing]
    made, why = told(tmp_path / "missing")
    assert made is None and why.startswith("not made: ")


@pytest.mark.parametrize(
    "gpu, mpi, why",
    [
        ({**TWO_GPUS, "devices": [], "no_device": "no CUDA driver"}, READY, "no CUDA driver"),
        ({**TWO_GPUS, "torch_devices": 0}, READY, "torch does not see the devices"),
        (TWO_GPUS, {**READY, "mpirun": None}, "no MPI, or no mpirun"),
        (TWO_GPUS, {**READY, "library": None}, "no MPI, or no mpirun"),
        (TWO_GPUS, {**READY, "mpirun_vendor": "Open MPI"}, "mpirun is of another MPI than mpi4py's"),
    ],
)
def test_nothing_is_started_where_it_could_prove_nothing(gpu, mpi, why):
    assert prove(gpu, mpi) == (None, f"not made: {why}")
