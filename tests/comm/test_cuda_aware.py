"""Which layer is believed on whether MPI takes device memory: every order, and what each makes of what it finds."""

import itertools

import pytest

from hpctrain.comm.cuda_aware import ask, by_info, by_library, by_switch, by_variables, disagreement, verdict
from tests.harness.launch import is_of_wheel

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"
OPENMPI, OPENMPI_4 = "Open MPI v5.0.11, package: ...", "Open MPI v4.1.6, package: ..."
MVAPICH = "MVAPICH2 Version      :\t2.3.7\n"
INTEL = "Intel(R) MPI Library 2021.14 for Linux* OS\n"
GTL = ["/opt/cray/pe/lib64/libmpi_gnu_123.so.12", "/opt/cray/pe/lib64/libmpi_gtl_cuda.so.0"]
LAYERS = ("switch", "info", "library", "variables")


@pytest.mark.parametrize("says", list(itertools.product((True, False, None), repeat=4)))
def test_the_first_that_knows_counts(says):
    answers = [(layer, said, f"{layer}'s reason") for layer, said in zip(LAYERS, says, strict=True)]
    known = [(layer, said) for layer, said in zip(LAYERS, says, strict=True) if said is not None]
    aware, why = verdict(answers)
    assert aware is (known[0][1] if known else False)
    assert why == (f"{known[0][0]}: {known[0][0]}'s reason" if known else "nobody knows")
    line = disagreement(answers)
    assert (line is not None) == (len({said for _, said in known}) == 2)
    assert line is None or (known[0][0] in line and "\n" not in line)


def test_who_disagrees_is_told_with_both_reasons():
    answers = [
        by_switch({"HPCTRAIN_CUDA_AWARE": "1"}),
        ("info", None, "..."),
        ("library", False, "its function gives 0"),
    ]
    assert disagreement(answers) == (
        "whether MPI is CUDA-aware: switch says yes (HPCTRAIN_CUDA_AWARE=1), library says no (its function gives 0); "
        "the first counts"
    )


@pytest.mark.parametrize("value, says", [("1", True), ("0", False), ("", None), (None, None)])
def test_the_switch(value, says):
    assert by_switch({} if value is None else {"HPCTRAIN_CUDA_AWARE": value})[1] is says


@pytest.mark.parametrize("value", ["2", "yes", "true", " 1", "-1", "\u0661"])
def test_a_switch_that_cannot_be_understood_is_one_line(value):
    with pytest.raises(ValueError, match="HPCTRAIN_CUDA_AWARE=.*: it is 0 .*, 1 .*, or not set") as raised:
        by_switch({"HPCTRAIN_CUDA_AWARE": value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "kinds, says",
    [
        ("mpi,system,cuda", True),
        ("mpi,system,cuda:device", True),
        ("system, CUDA:device:managed,mpi", True),
        ("mpi,system", None),
        ("mpi,system,cuda:host", None),
        ("mpi,system,rocm:device", None),
        ("mpi:alloc_mem", None),
        ("", None),
        (None, None),
    ],
)
def test_the_kinds_of_memory(kinds, says):
    assert by_info(kinds)[1] is says


class Gpu:
    """A library with MPICH's function; the other one would fail its assertion."""

    def __init__(self, flag, code=0):
        self.flag, self.code, self.kinds = flag, code, []

    def MPIX_GPU_query_support(self, kind, flag):
        self.kinds.append(kind)
        flag._obj.value = self.flag
        return self.code

    def MPIX_Query_cuda_support(self):
        raise AssertionError("as in MPICH 3.4")


class Cuda:
    """A library with Open MPI's function."""

    def __init__(self, value):
        self.value = value

    def MPIX_Query_cuda_support(self):
        return self.value


@pytest.mark.parametrize(
    "mpi, library, says",
    [
        (Gpu(1), MPICH, True),
        (Gpu(0), MPICH, False),
        (Gpu(0, code=1), MPICH, None),
        (Cuda(1), OPENMPI, True),
        (Cuda(0), OPENMPI, False),
        (Cuda(1), OPENMPI_4, None),
        (Cuda(0), OPENMPI_4, False),
        (Cuda(1), MVAPICH, None),
        (Cuda(0), MVAPICH, False),
        (object(), MPICH, None),
        (None, MPICH, None),
    ],
)
def test_the_librarys_own_functions(mpi, library, says):
    layer, said, why = by_library(mpi, library)
    assert said is says and why
    assert getattr(mpi, "kinds", [0]) == [0]  # CUDA, in MPICH's header


@pytest.mark.parametrize(
    "environ, library, says",
    [
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, CRAY, True),
        ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, CRAY, False),
        ({"MPICH_GPU_SUPPORT_ENABLED": "maybe"}, CRAY, None),
        ({}, CRAY, None),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, MPICH, None),
        ({"MV2_USE_CUDA": "1"}, MVAPICH, True),
        ({"MV2_USE_CUDA": "0"}, MVAPICH, False),
        ({"MVP_USE_CUDA": "1"}, "MVAPICH Version: 3.0", True),
        ({"MV2_USE_CUDA": "1"}, OPENMPI, None),
        ({"I_MPI_OFFLOAD": "1"}, INTEL, None),
        ({"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "level_zero"}, INTEL, None),
        ({"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda"}, INTEL, True),
        ({"I_MPI_OFFLOAD": "0", "I_MPI_OFFLOAD_MODE": "cuda"}, INTEL, False),
        ({"OMPI_MCA_opal_cuda_support": "true"}, OPENMPI_4, True),
        ({"OMPI_MCA_opal_cuda_support": "0"}, OPENMPI_4, False),
        ({"OMPI_MCA_opal_cuda_support": ""}, OPENMPI_4, None),
    ],
)
def test_variables_count_for_the_library_that_reads_them(environ, library, says):
    layer, said, why = by_variables(environ, library, GTL)
    assert said is says and why


def test_what_cray_linked_for_other_devices_does_not_count():
    hsa = [path.replace("gtl_cuda", "gtl_hsa") for path in GTL]
    assert by_variables({"MPICH_GPU_SUPPORT_ENABLED": "1"}, CRAY, hsa)[1] is None


def test_a_variable_of_another_library_is_named():
    assert by_variables({"MV2_USE_CUDA": "1"}, MPICH, [])[2] == "MPICH 5.0.2 does not read MV2_USE_CUDA"


@pytest.mark.mpi
@pytest.mark.skipif(not is_of_wheel(), reason="the system's MPI may be CUDA-aware")
def test_mpi_of_a_wheel_is_not_cuda_aware(comm, monkeypatch):
    monkeypatch.delenv("HPCTRAIN_CUDA_AWARE", raising=False)
    answers = ask(comm)
    assert [layer for layer, _, _ in answers] == list(LAYERS)
    assert answers[2][1] is False, answers  # by the function of the library that is loaded
    assert verdict(answers)[0] is False and disagreement(answers) is None
