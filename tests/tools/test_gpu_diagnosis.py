"""What the doctor concludes about devices from made-up facts, and what it finds out on this machine."""

import os

import pytest

from hpctrain.comm.devices import torch_cuda
from hpctrain.tools.diagnosis import exit_code, findings, report
from hpctrain.tools.doctor import run
from hpctrain.tools.gpu_diagnosis import DIRECT, HOST, STAGED, gpu_findings, gpu_table
from hpctrain.tools.gpus import gpu_facts
from tests.harness.launch import ROOT, run_python
from tests.tools.gpu_facts import AWARE, NO_GPU, NOT_AWARE, TWO_GPUS
from tests.tools.test_doctor import MPI, RANK

HIDDEN = {**TWO_GPUS, "devices": [], "no_device": "cuInit: CUDA_ERROR_NO_DEVICE", "torch_devices": 0}
SERVER = {**NO_GPU, "no_device": "a server takes none"}
SWITCHED = [["switch", True, "HPCTRAIN_CUDA_AWARE=1"], *NOT_AWARE[1:]]


def ranks_with(*gpus, servers=0):
    """Ranks in turn on one host with these facts; the last ones are servers."""
    first = len(gpus) - servers
    return [{**RANK, "gpu": gpu, "is_server": number >= first} for number, gpu in enumerate(gpus)]


def told(ranks, answers, required=False, proof=None):
    return list(gpu_findings(ranks, {**MPI, "cuda_aware": answers, "proof": proof}, required))


def table(ranks, answers, proof=None):
    return gpu_table(ranks, {"cuda_aware": answers, "proof": proof})


def row(name, ranks, answers):
    return dict(table(ranks, answers))[name]


@pytest.mark.parametrize(
    "gpus, answers, path",
    [
        ([NO_GPU] * 2, [NOT_AWARE] * 2, HOST),
        ([NO_GPU] * 2, [AWARE] * 2, HOST),
        ([TWO_GPUS] * 2, [NOT_AWARE] * 2, STAGED),
        ([TWO_GPUS] * 2, [AWARE] * 2, DIRECT),
        ([TWO_GPUS] * 2, [AWARE, NOT_AWARE], STAGED),
        ([TWO_GPUS] * 2, ["HPCTRAIN_CUDA_AWARE=2: ...", AWARE], STAGED),
        ([TWO_GPUS], [None], STAGED),
    ],
)
def test_the_path_of_gradients(gpus, answers, path):
    assert row("path of gradients", ranks_with(*gpus), answers) == path


def test_the_table_shows_what_each_rank_would_take():
    rows = table(ranks_with(TWO_GPUS, TWO_GPUS, SERVER, servers=1), [AWARE] * 3, proof=(True, "every element"))
    assert ("  proof", "every element") in rows
    assert ("CUDA devices", "2 seen") in rows
    assert ("  n1", "rank 0: number 0 of 2; rank 1: number 1 of 2; rank 2: none, a server takes none") in rows
    assert ("SLURM_GPUS_ON_NODE", "ranks 0, 1: 2; rank 2: not set") in rows
    assert ("CUDA of torch", "13.0, sees 2") in rows
    assert ("CuPy", "cupy-cuda13x 14.0.1") in rows
    assert ("CUDA-aware MPI", "yes (info: mpi_memory_alloc_kinds is mpi,system,cuda)") in rows
    assert ("  switch", "does not know: HPCTRAIN_CUDA_AWARE is not set") in rows


def test_without_devices_one_row_says_why():
    assert row("CUDA devices", ranks_with(NO_GPU, NO_GPU), [NOT_AWARE] * 2) == "none, no CUDA driver (libcuda.so.1)"
    assert row("CUDA of torch", ranks_with(NO_GPU), [NOT_AWARE]) == "none: built without"
    assert row("CUDA-aware MPI", ranks_with(NO_GPU), [None]) == "not asked"


def test_long_names_of_variables_move_the_column():
    gpu = {**NO_GPU, "variables": {"SLURM_GPUS_PER_SOCKET": "2"}}
    lines = report(ranks_with(gpu), MPI)
    assert "SLURM_GPUS_PER_SOCKET  2" in lines and "numpy                  2.0" in lines


def test_devices_for_all_are_no_finding():
    assert told(ranks_with(TWO_GPUS, TWO_GPUS), [AWARE] * 2, required=True) == []
    assert told(ranks_with(TWO_GPUS, TWO_GPUS, SERVER, servers=1), [AWARE] * 3, required=True) == []


@pytest.mark.parametrize(
    "gpus, answers, required, kind, words",
    [
        ([TWO_GPUS] * 3, [AWARE] * 3, False, "warning", "n1: ranks 0, 2 share device GPU-a"),
        ([TWO_GPUS, HIDDEN], [AWARE] * 2, False, "warning", "rank 1 on n1 sees no CUDA device, rank 0 on n1 does"),
        ([TWO_GPUS, HIDDEN], [AWARE] * 2, True, "problem", "--require cuda: rank 1 on n1: cuInit: CUDA_ERROR_NO_DEVI"),
        ([NO_GPU], [NOT_AWARE], True, "problem", "--require cuda: rank 0 on n1: no CUDA driver"),
        ([{**TWO_GPUS, "torch_cuda": None}], [AWARE], True, "problem", "rank 0 on n1: torch is built without CUDA"),
        ([{**TWO_GPUS, "torch_devices": 0}], [AWARE], True, "problem", "the driver shows 2 devices, torch 0"),
        ([TWO_GPUS] * 2, [AWARE, NOT_AWARE], False, "warning", "CUDA-aware on some ranks only"),
        ([NO_GPU], [SWITCHED], False, "warning", "switch says yes (HPCTRAIN_CUDA_AWARE=1), library says no"),
        ([NO_GPU], ["HPCTRAIN_CUDA_AWARE=2: it is 0, 1"], False, "problem", "HPCTRAIN_CUDA_AWARE=2"),
    ],
)
def test_a_finding(gpus, answers, required, kind, words):
    found = told(ranks_with(*gpus), answers, required)
    assert len(found) == 1
    assert found[0][0] == kind and words in found[0][1] and found[0][2]


@pytest.mark.parametrize(
    "answers, proof, kind, words",
    [
        (
            AWARE,
            (False, "a rank ended by a segmentation fault"),
            "problem",
            "say that MPI takes device memory, and a rank",
        ),
        (NOT_AWARE, (True, "every element arrived"), "warning", "MPI takes device memory, though layers do not say so"),
    ],
)
def test_a_proof_that_differs_from_what_layers_say(answers, proof, kind, words):
    found = told(ranks_with(TWO_GPUS), [answers], proof=proof)
    assert len(found) == 1 and found[0][0] == kind and words in found[0][1]


@pytest.mark.parametrize("answers, proof", [(AWARE, (True, "")), (NOT_AWARE, (False, "")), (AWARE, (None, "not made"))])
def test_a_proof_that_agrees_or_was_not_made_is_no_finding(answers, proof):
    assert told(ranks_with(TWO_GPUS), [answers], proof=proof) == []


def test_only_what_is_required_is_a_problem():
    mpi = {**MPI, "cuda_aware": [NOT_AWARE]}
    assert exit_code(findings(ranks_with(NO_GPU), mpi)) == 0
    assert exit_code(findings(ranks_with(NO_GPU), mpi, cuda_required=True)) == 1


STUB = """
import sys
from hpctrain.tools import gpus
for devices in ([], ["GPU-a", "GPU-b"]):
    gpus.visible_devices = lambda: (devices, None)
    facts = gpus.gpu_facts({}, is_server=False)
    print(facts["torch_cuda"], facts["torch_devices"], "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "source, sees",
    [
        ("class cuda:\n    device_count = staticmethod(lambda: 2)\n", "2 True"),
        ("raise OSError('libcudart.so.13: cannot open')\n", "libcudart.so.13: cannot open False"),
    ],
)
def test_a_torch_with_cuda_is_loaded_only_where_the_driver_shows_devices(tmp_path, source, sees):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    (tmp_path / "torch/__init__.py").write_text(source)
    result = run_python("-c", STUB, timeout=60, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert result.stdout == f"13.0 0 False\n13.0 {sees}\n", result


def test_a_server_asks_for_no_device(monkeypatch):
    monkeypatch.setattr("hpctrain.tools.gpus.visible_devices", lambda: pytest.fail("asked"))
    assert gpu_facts({}, is_server=True)["devices"] == []


def test_the_cuda_of_torch_is_read_without_loading_it():
    import torch

    assert torch_cuda() == torch.version.cuda


def test_variables_of_devices_are_kept():
    environ = {"SLURM_STEP_GPUS": "0,1", "SLURM_NTASKS": "2", "CUDA_VISIBLE_DEVICES": "", "CUDA_PATH": "/cuda"}
    assert gpu_facts(environ, False)["variables"] == {"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("argv, code", [(["--servers", "1"], 0), (["--require", "cuda"], 1)])
def test_all_ranks_return_the_same_code(comm, argv, code, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(argv, comm) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert (comm.rank == 0) == ("path of gradients no device: host memory" in shown)
    assert (comm.rank == 0 and code == 1) == ("--require cuda: rank 0 on" in shown)


@pytest.mark.mpi(min_size=2)
def test_a_rank_with_a_wrong_switch_is_a_problem_of_all(comm, monkeypatch, capsys):
    monkeypatch.setenv("HPCTRAIN_CUDA_AWARE", "maybe" if comm.rank == 1 else "0")
    assert run([], comm) == 1
    assert (comm.rank == 0) == ("problem: HPCTRAIN_CUDA_AWARE=maybe: it is 0" in capsys.readouterr().out)
