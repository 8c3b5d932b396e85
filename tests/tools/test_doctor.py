"""The doctor's conclusions from made-up facts, and the doctor alone on this machine."""

import subprocess

import pytest

from hpctrain.tools.diagnosis import exit_code, findings, report
from hpctrain.tools.doctor import mpi_facts, rank_facts, write_error
from hpctrain.tools.outside import reason
from tests.harness.launch import run_python
from tests.tools.gpu_facts import NO_GPU, NOT_AWARE

GIB = 1 << 30
RANK = {
    "host": "n1",
    "node": 1,
    "is_server": False,
    "gpu": NO_GPU,
    "cores": list(range(8)),
    "shared_memory_free": 16 * GIB,
    "open_files": 4096,
    "omp_num_threads": None,
    "run_dir": "/scratch/runs",
    "run_dir_error": None,
}
MPI = {
    "versions": {"hpctrain": "0.1.0", "python": "3.12.1", "numpy": "2.0", "torch": "2.13.0", "mpi4py": "4.1.2"},
    "library": "MPICH Version:      5.0.2\nMPICH Release date: ...",
    "library_path": "/lib/libmpi.so.12",
    "thread_multiple": True,
    "error": None,
    "world_error": None,
    "launcher": "mpirun of MPICH",
    "mpirun": "/bin/mpirun",
    "mpirun_vendor": None,
    "cuda_aware": [NOT_AWARE],
    "proof": None,
}
NO_MPI = {**MPI, "library": None, "library_path": None, "thread_multiple": None, "mpirun": None}
CASES = {
    "mpi4py missing": ({**NO_MPI, "versions": {**MPI["versions"], "mpi4py": None}}, {}, 0, '"hpctrain[mpi]"'),
    "no library": ({**NO_MPI, "error": "cannot load libmpi.so"}, {}, 1, "cannot load libmpi.so"),
    "torch missing": ({**MPI, "versions": {**MPI["versions"], "torch": None}}, {}, 1, "pip install torch"),
    "small world": ({**MPI, "world_error": "srun started 8 ranks, ..."}, {}, 1, "srun started 8 ranks"),
    "thread level": ({**MPI, "thread_multiple": False}, {}, 0, "less than MPI_THREAD_MULTIPLE"),
    "another mpirun": ({**MPI, "mpirun_vendor": "Open MPI"}, {}, 1, "the mpirun of MPICH first in PATH"),
    "the same mpirun": ({**MPI, "mpirun_vendor": "MPICH"}, {}, 0, "nothing to complain about"),
    "no mpirun": ({**MPI, "mpirun": None}, {}, 0, "no mpirun in PATH"),
    "folder": (MPI, {"run_dir_error": "Read-only file system"}, 1, "n1: Read-only file system"),
    "crowd": (MPI, {"cores": [0]}, 0, "n1: 2 ranks share 1 core"),
    "little shared memory": (MPI, {"shared_memory_free": 1 << 20}, 0, "--shm-size"),
    "no shared memory": (MPI, {"shared_memory_free": None}, 0, "n1: no shared memory"),
    "few files": (MPI, {"open_files": 64}, 0, "ulimit -n"),
}


@pytest.mark.parametrize("mpi, rank, code, words", CASES.values(), ids=CASES)
def test_findings(mpi, rank, code, words):
    ranks = [{**RANK, **rank}] * 2
    assert words in "\n".join(report(ranks, mpi))
    assert exit_code(findings(ranks, mpi)) == code
    assert len(findings(ranks, mpi)) == (words != "nothing to complain about")


def test_facts_without_a_fault_have_no_findings():
    assert findings([RANK] * 8, MPI) == []


def test_the_table_counts_hosts_ranks_and_cores():
    ranks = [{**RANK, "cores": [0, 1]}, {**RANK, "cores": [2, 3]}, {**RANK, "host": "n2", "omp_num_threads": "4"}]
    lines = [" ".join(line.split()) for line in report(ranks, MPI)]
    assert "ranks 3 ranks on 2 hosts" in lines
    assert "n1 2 ranks, 4 cores" in lines
    assert "n2 1 rank, 8 cores" in lines
    assert "threads per rank 2 by default (OMP_NUM_THREADS 4, not set)" in lines
    assert "MPI library MPICH 5.0.2, /lib/libmpi.so.12" in lines


def test_the_facts_of_this_process_have_the_fields_that_the_diagnosis_reads(tmp_path):
    assert rank_facts(str(tmp_path)).keys() == RANK.keys()
    assert mpi_facts().keys() == MPI.keys()


def test_a_folder_that_cannot_be_written_is_found(tmp_path):
    assert write_error(tmp_path / "runs" / "new") is None
    (tmp_path / "file").write_text("")
    assert write_error(tmp_path / "file" / "runs") == "Not a directory"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_why_a_process_failed():
    raised = subprocess.CalledProcessError(1, "python", stderr="Traceback\nRuntimeError: no libmpi\n")
    assert reason(raised) == "RuntimeError: no libmpi"
    assert "SIGSEGV" in reason(subprocess.CalledProcessError(-11, "python", stderr=""))


def test_alone(tmp_path):
    result = run_python("-m", "hpctrain", "doctor", "--run-dir", tmp_path / "runs", timeout=60)
    assert result.returncode == 0, result
    assert "MPI_THREAD_MULTIPLE" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_a_wrong_flag_is_one_line():
    result = run_python("-m", "hpctrain", "doctor", "--run-dri", "x", timeout=60)
    assert result.returncode == 2, result
    assert result.stderr.count("\n") == 1 and "--run-dri" in result.stderr


def test_a_wrong_switch_is_a_problem():
    result = run_python("-m", "hpctrain", "doctor", timeout=60, env={"HPCTRAIN_CUDA_AWARE": "2"})
    assert result.returncode == 1, result
    assert result.stdout.count("problem: ") == 1 and "problem: HPCTRAIN_CUDA_AWARE=2: it is 0 " in result.stdout, result


def test_a_proof_without_a_device_is_not_made_and_says_so():
    result = run_python("-m", "hpctrain", "doctor", "--prove", timeout=60, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0 and "proof not made: " in " ".join(result.stdout.split()), result
