"""The harness under a real mpirun, against planted faults: a rank fails, a rank hangs, something is left running."""

import shutil
import sys
import textwrap

import pytest

from tests.harness import launch as launch_module
from tests.harness.launch import ROOT, run_mpi
from tests.harness.leftovers import remove_shared_memory, shared_memory

PYTEST = (sys.executable, "-m", "pytest", "--with-mpi", "-m", "mpi", "-p", "no:hypothesispytest", "-p", "no:typeguard")


@pytest.fixture
def project(tmp_path):
    """A project of one test module beside our own conftest; called with the body of a test, it gives its folder."""
    shutil.copytree(ROOT / "tests/harness", tmp_path / "tests/harness", ignore=shutil.ignore_patterns("test_*"))
    for name in ("tests/__init__.py", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)

    def write(body: str):
        head = "import time, pytest\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        (tmp_path / "tests/test_planted.py").write_text(head + textwrap.dedent(body))
        return tmp_path

    return write


def launch(n: int, folder, **env):
    return run_mpi(n, PYTEST, timeout=60, cwd=folder, env={"PYTHONPATH": str(folder), **env})


def test_a_failure_on_one_rank_is_told_by_rank_0_with_its_number_and_a_command(project):
    folder = project("""
        @pytest.mark.mpi
        def test_it(shared_seed, shared_tmp_path):
            print("output of", world.rank)
            assert world.rank != 2
    """)
    result = launch(3, folder, HPCTRAIN_TEST_SEED="7")
    assert result.returncode == 1, result
    assert "failed on rank 2 of 3" in result.stdout
    assert "output of 2" in result.stdout
    command = "HPCTRAIN_TEST_SEED=7 mpirun -n 3 python -m pytest --with-mpi 'tests/test_planted.py::test_it'"
    assert command in result.stdout
    assert result.stdout.count("1 failed") == 1, result


def test_a_hang_ends_with_the_stacks_of_every_rank(project):
    folder = project("""
        @pytest.mark.mpi
        def test_it():
            if world.rank == 1:
                wait_for_a_message_that_nobody_sends()

        def wait_for_a_message_that_nobody_sends():
            world.Recv(bytearray(1), 0)
    """)
    before = shared_memory()
    result = launch(2, folder, HPCTRAIN_TEST_LIMIT="2")
    remove_shared_memory(before)
    assert result.returncode == 76, result
    assert "[rank 0] tests/test_planted.py::test_it took more than 2 s" in result.stderr
    assert "in wait_for_a_message_that_nobody_sends" in result.stderr


def test_ranks_that_collect_different_tests_are_refused(project):
    folder = project("""
        @pytest.mark.mpi
        @pytest.mark.parametrize("i", range(1 + world.rank))
        def test_it(i):
            pass
    """)
    result = launch(2, folder)
    assert result.returncode == 1, result
    assert "the ranks collected different tests" in result.stdout + result.stderr


def test_hypothesis_is_refused_under_mpirun(project):
    folder = project("""
        from hypothesis import given, strategies

        @pytest.mark.mpi
        @given(strategies.integers())
        def test_it(i):
            pass
    """)
    result = launch(2, folder)
    assert result.returncode == 1, result
    assert "use shared_seed" in result.stdout + result.stderr


def test_a_launch_over_its_limit_is_ended_and_shows_its_output():
    program = "import time; from mpi4py import MPI; print('begun', flush=True); time.sleep(60)"
    with pytest.raises(AssertionError, match=r"(?s)more than 3 s: .*begun"):
        run_mpi(2, [sys.executable, "-c", program], timeout=3)


def test_what_a_launch_leaves_running_is_noticed_and_ended(monkeypatch):
    monkeypatch.setattr(launch_module, "PATIENCE", 1.0)
    program = "from subprocess import *; Popen(['sleep', '60'], start_new_session=True, stdout=DEVNULL, stderr=DEVNULL)"
    with pytest.raises(AssertionError, match="left running by .*: sleep 60"):
        run_mpi(1, [sys.executable, "-c", program], timeout=30)
