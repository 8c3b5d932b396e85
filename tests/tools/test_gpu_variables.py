"""Variables that harm device memory: the doctor warns of each one that docs/gpu.md names, and of no harmless value."""

import re

import pytest

from hpctrain.tools.diagnosis import exit_code, findings
from hpctrain.tools.gpu_variables import NAMES, harmful
from hpctrain.tools.gpus import gpu_facts
from tests.harness.launch import ROOT
from tests.tools.gpu_facts import AWARE, NO_GPU, TWO_GPUS
from tests.tools.test_doctor import MPI, NO_MPI, RANK

PAGE = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Variables that do harm")[2].partition("\n## ")[0]
SETTINGS = re.findall(r"^\| `(\w+)=([^`]+)` \|", TABLE, re.MULTILINE)
CRAY = "CRAY MPICH version 8.1.30 (ANL base 3.4a2)"
GTL = [*AWARE[:3], ["variables", True, "MPICH_GPU_SUPPORT_ENABLED=1"]]
NO_GTL = [*AWARE[:3], ["variables", None, "MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_cuda is not loaded"]]


def ranks_with(*environs, gpu=TWO_GPUS):
    """Ranks of one host, each with these variables."""
    return [{**RANK, "gpu": {**gpu, "variables": environ}} for environ in environs]


def told(ranks, required=False, **mpi):
    return list(harmful(ranks, {**MPI, **mpi}, required))


def one_each(*names):
    """Ranks of one host that see one device each."""
    gpus = [{**TWO_GPUS, "devices": [name], "torch_devices": 1} for name in names]
    return [{**RANK, "gpu": {**gpu, "variables": {"CUDA_VISIBLE_DEVICES": str(at)}}} for at, gpu in enumerate(gpus)]


def test_the_page_names_the_variables_that_the_doctor_knows():
    assert {name for name, _ in SETTINGS} == NAMES


@pytest.mark.parametrize("name, value", SETTINGS)
def test_the_doctor_warns_of_what_the_page_calls_harmful(name, value):
    ranks = one_each("GPU-a", "GPU-b") if name == "CUDA_VISIBLE_DEVICES" else ranks_with({name: value})
    mpi = {**NO_MPI, "error": "MPI_Init ended"} if name == "MPICH_GPU_SUPPORT_ENABLED" else MPI
    ((kind, what, cure),) = told(ranks, **mpi)
    assert kind == "warning" and name in what and cure
    assert (kind, what, cure) in findings(ranks, mpi)
    assert gpu_facts({name: value}, False)["variables"] == {name: value}


@pytest.mark.parametrize("name, value", SETTINGS)
def test_a_warning_stops_nothing(name, value):
    assert exit_code(told(ranks_with({name: value}))) == 0


@pytest.mark.parametrize(
    "name, value",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:False"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native"),
        ("UCX_TLS", "rc,sm,cuda"),
        ("UCX_TLS", "cuda_copy,cuda_ipc,rc"),
        ("UCX_TLS", "all"),
        ("UCX_TLS", "^rc"),
        ("UCX_TLS", ""),
        ("MPIR_CVAR_ENABLE_GPU", "1"),
        ("OMPI_MCA_btl_smcuda_use_cuda_ipc", "1"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("MPICH_GPU_SUPPORT_ENABLED", "0"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
    ],
)
def test_harmless_values(name, value):
    assert told(ranks_with({name: value}, {name: value}), required=True) == []


@pytest.mark.parametrize(
    "value", ["max_split_size_mb:128, expandable_segments:True", "Expandable_Segments:true", "backend:cudaMallocAsync"]
)
def test_one_of_several_settings_of_torch(value):
    assert len(told(ranks_with({"PYTORCH_CUDA_ALLOC_CONF": value}))) == 1


@pytest.mark.parametrize("value", ["rc_x,sm", "^cuda", "^cuda_copy,rc", "cuda_ipc,gdr_copy,rc"])
def test_transports_that_do_not_notice_device_memory(value):
    assert len(told(ranks_with({"UCX_TLS": value}))) == 1


def test_ranks_that_differ_are_told_by_value_and_equal_ones_once():
    environs = [{"UCX_TLS": "tcp"}, {}, {"UCX_TLS": "tcp"}, {"UCX_TLS": "rc"}]
    assert [what.partition(":")[0] for _, what, _ in told(ranks_with(*environs))] == ["UCX_TLS=tcp", "UCX_TLS=rc"]


@pytest.mark.parametrize("required, number", [(False, 0), (True, 1)])
def test_without_devices_only_who_requires_them_is_warned(required, number):
    assert len(told(ranks_with({"CUDA_LAUNCH_BLOCKING": "1"}, gpu=NO_GPU), required)) == number


@pytest.mark.parametrize(
    "library, answers, number",
    [
        (CRAY, NO_GTL, 1),
        (CRAY, GTL, 0),
        (None, None, 1),  # it ended before it could be asked
        (MPI["library"], AWARE, 0),  # which does not read it
    ],
)
def test_cray_without_its_library_for_devices(library, answers, number):
    ranks = ranks_with({"MPICH_GPU_SUPPORT_ENABLED": "1"}, gpu=NO_GPU)
    assert len(told(ranks, library=library, cuda_aware=[answers])) == number


def test_ranks_that_see_nothing_of_each_other_are_told_once_a_node():
    assert len(told(one_each("GPU-a", "GPU-b", "GPU-c"))) == 1
    assert told(one_each("GPU-a", "GPU-a")) == []
    here, there = one_each("GPU-a", "GPU-b")
    assert told([here, {**there, "node": 2}]) == []
