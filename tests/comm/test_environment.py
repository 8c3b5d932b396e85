"""Which of the launchers' variables is believed, over environments as they were seen on real systems."""

import os
import shutil

import pytest

from hpctrain.comm.environment import (
    Announced,
    announced,
    check_launcher,
    check_world,
    cores_allowed,
    crowding,
    library_name,
    mpi_library_path,
    shared_memory_free,
    threads_per_rank,
    vendor,
    wants_mpi,
)

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n"
OPENMPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\x00"
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
PROXY = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
STEP = {**BATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}
HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "5", "PMI_FD": "9", "HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": "8"}
PRTERUN = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "PMIX_RANK": "5"}
PRTERUN_PMIX = {"PMIX_RANK": "5", "PMIX_NAMESPACE": "prterun-n1-42@1"}
SRUN_PMIX = {**STEP, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.1"}

TABLE = {
    "plain python": ({}, None, None, "none", False),
    "plain python in a batch shell": (BATCH, None, None, "none", False),
    "plain python in a shell of salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None, None, "none", False),
    "mpirun of MPICH": (HYDRA, 8, 5, "mpirun of MPICH", True),
    "mpirun of MPICH in a job": ({**PROXY, **HYDRA}, 8, 5, "mpirun of MPICH", True),
    "mpirun of MPICH, one rank": ({**HYDRA, "PMI_SIZE": "1", "PMI_RANK": "0"}, 1, 0, "mpirun of MPICH", True),
    "mpirun of Open MPI": (PRTERUN, 8, 5, "mpirun of Open MPI", True),
    "mpirun of Open MPI in a job": ({**PROXY, **PRTERUN}, 8, 5, "mpirun of Open MPI", True),
    "prterun without OMPI variables, in a job": ({**PROXY, **PRTERUN_PMIX}, None, 5, "a PMIx launcher", True),
    "mpirun_rsh": ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1"}, 4, 1, "mpirun of MVAPICH2", True),
    "srun --mpi=pmi2": ({**STEP, "PMI_SIZE": "8", "PMI_RANK": "3", "PMI_FD": "9"}, 8, 3, "srun", True),
    "srun --mpi=pmix": (SRUN_PMIX, None, 3, "srun", True),
    "srun --mpi=none": (STEP, 8, 3, "srun", True),
    "srun --mpi=none, task 0": ({**STEP, "SLURM_PROCID": "0"}, 8, 0, "srun", True),
    "srun -n 1": ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1, 0, "srun", False),
    "a task's own number and SLURM_NTASKS only": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, 4, 2, "srun", True),
    "a job of one task": ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None, None, "none", False),
    "nonsense": ({"PMI_SIZE": "many", "SLURM_NTASKS": "", "SLURM_PROCID": "-1"}, None, None, "none", False),
}


@pytest.mark.parametrize("environ, size, rank, launcher, wants", TABLE.values(), ids=TABLE)
def test_announced(environ, size, rank, launcher, wants):
    said = announced(environ)
    assert (said.size, said.rank, said.launcher) == (size, rank, launcher)
    assert (said.variable is None) == (size is None)
    assert wants_mpi(environ) is wants


@pytest.mark.parametrize("environ", [{}, HYDRA, STEP])
def test_the_switch_overrides_the_launcher(environ):
    assert wants_mpi({**environ, "HPCTRAIN_MPI": "1"})
    assert not wants_mpi({**environ, "HPCTRAIN_MPI": "0"})


@pytest.mark.parametrize("value", ["yes", "2", " 1", "true"])
def test_a_wrong_switch_is_refused(value):
    with pytest.raises(ValueError, match="^HPCTRAIN_MPI=.*0 .*1 "):
        wants_mpi({"HPCTRAIN_MPI": value})


@pytest.mark.parametrize(
    "environ, version, cure",
    [
        (STEP, MPICH, "srun --mpi=pmi2"),
        (STEP, OPENMPI, "srun --mpi=pmix"),
        (STEP, "Cray MPI 9", "srun --mpi=pmix or pmi2"),
        (PRTERUN, MPICH, "the mpirun of MPICH,"),
        (HYDRA, OPENMPI, "the mpirun of Open MPI,"),
        (HYDRA, MPICH, "the mpirun of MPICH itself"),
    ],
)
def test_a_world_that_is_too_small_is_refused_with_its_cure(environ, version, cure):
    with pytest.raises(ValueError) as caught:
        check_world(announced(environ), 1, version)
    message = str(caught.value)
    assert "started 8 ranks" in message and "world has 1:" in message
    assert library_name(version) in message and cure in message and "HPCTRAIN_MPI=0" in message
    assert "\n" not in message and "\0" not in message


def test_mpich_under_the_mpirun_of_open_mpi_is_refused_before_mpi_init_would_end_it():
    with pytest.raises(ValueError, match="mpirun of Open MPI started 8 ranks, but mpi4py loaded MPICH 5.0.2"):
        check_launcher(announced(PRTERUN), MPICH)
    for environ, version in ((PRTERUN, OPENMPI), (HYDRA, MPICH), (HYDRA, OPENMPI), (SRUN_PMIX, MPICH), ({}, MPICH)):
        check_launcher(announced(environ), version)


def test_the_refusal_names_the_variable():
    with pytest.raises(ValueError, match=r"^srun started 4 ranks \(SLURM_NTASKS\), but MPI's world has 1:"):
        check_world(announced({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}), 1, MPICH)


@pytest.mark.parametrize("environ", [environ for environ, *_ in TABLE.values()])
def test_the_right_world_is_accepted(environ):
    check_world(announced(environ), announced(environ).size or 8, MPICH)


def test_a_variable_left_over_from_an_outer_step_does_no_harm():
    check_world(Announced(1, 0, "PMI_SIZE", "srun"), 8, OPENMPI)


def test_names():
    assert (library_name(MPICH), vendor(MPICH)) == ("MPICH 5.0.2", "MPICH")
    assert (library_name(OPENMPI), vendor(OPENMPI)) == ("Open MPI v5.0.11", "Open MPI")
    assert vendor("HYDRA build details:\n  Version: 5.0.2") == "MPICH"
    assert vendor("mpirun (Open MPI) 5.0.11") == "Open MPI"


@pytest.mark.parametrize(
    "places, threads",
    [
        ([("a", [0, 1])], 2),
        ([("a", [0, 1])] * 8, 1),
        ([("a", range(8))] * 2, 4),
        ([("a", range(4)), ("a", range(4, 8))], 4),  # each rank bound to its own cores
        ([("a", range(8)), ("b", range(8)), ("b", range(8))], 4),
    ],
)
def test_threads_per_rank(places, threads):
    assert threads_per_rank(places) == threads


@pytest.mark.parametrize(
    "places, threads, fitting",
    [
        ([("a", range(8))] * 2, 4, None),
        ([("a", [0, 1])] * 8, 1, None),  # more ranks than cores is a choice; nothing is to be told apart
        ([("a", range(8))] * 2, 8, 4),
        ([("a", [0]), ("a", [1])], 4, 1),  # bound
        ([("a", range(8)), ("b", range(2))], 8, 2),
    ],
)
def test_more_threads_than_cores_are_told_with_what_fits(places, threads, fitting):
    said = crowding(places, threads)
    if fitting is None:
        assert said is None
    else:
        assert said.startswith(f"{threads} threads a rank") and f"--threads {fitting} is faster" in said
        assert "--bind-to none" in said


def test_this_machine():
    assert set(cores_allowed()) <= os.sched_getaffinity(0)
    assert 1 <= len(cores_allowed()) <= len(os.sched_getaffinity(0))
    assert shared_memory_free("/no/such/folder") is None
    if os.path.isdir("/dev/shm"):
        assert shared_memory_free() <= shutil.disk_usage("/dev/shm").total


@pytest.mark.mpi
def test_this_launch():
    from mpi4py import MPI

    said = announced(os.environ)
    check_world(said, MPI.COMM_WORLD.size, MPI.Get_library_version())
    assert said.size in (None, MPI.COMM_WORLD.size)
    assert said.rank in (None, MPI.COMM_WORLD.rank)
    assert vendor(MPI.Get_library_version()) in ("MPICH", "Open MPI")
    assert "libmpi" in mpi_library_path()
