"""A user's own script that only makes a Mesh ends as a whole: at once with a traceback, in order when all is well.

Only scripts that train load torch, which takes long to start on each rank.
"""

import os
import re
import sys
import textwrap
import time

import pytest

from tests.harness.launch import ROOT, mpirun, run_mpi, run_python, vendor

SECONDS = 5  # the promise
HEAD = """
import os, sys, threading, time
from pathlib import Path
from hpctrain import AllReduce, Mesh, abort_on_error

def happens():
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))

def fail():
    happens()
    raise ValueError("boom")
"""
LOOP = """
import numpy as np
mesh = Mesh()
for step in range(4):
    if mesh.rank == 1 and step == 2:
        {fault}
    AllReduce(mesh, "mean")(np.ones(100), "step")
"""
CLOSES = r"rank 1 call (\d+) close .*, but rank \d call \1 .*'step'|'step' .*, but rank 1 call \d+ close"
MESH_FIRST = ""
MPI_FIRST = "from mpi4py import MPI\n"


@pytest.fixture
def script(tmp_path):
    """Runs `body` on n ranks (0: without a launcher); returns the result."""

    def run(body, n=3, **env):
        (tmp_path / "script.py").write_text(HEAD + textwrap.dedent(body))
        moment = tmp_path / "moment"
        how = {"timeout": 60, "cwd": tmp_path, "env": {"FAULT_TIME": moment, **env}}
        result = run_mpi(n, [sys.executable, "script.py"], **how) if n else run_python("script.py", **how)
        if moment.exists():
            assert time.time() - float(moment.read_text()) < SECONDS + 1, result
        return result

    return run


@pytest.mark.parametrize(
    "fault, code, words",
    [
        ("threading.Thread(target=fail).start(); time.sleep(3600)", 1, "ValueError: boom"),
        ("happens(); import signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 130, "KeyboardInterrupt"),
        ("happens(); sys.exit(3)", 1, CLOSES),
        ("happens(); break", 1, CLOSES),
    ],
)
def test_what_ends_one_rank_ends_the_job(script, fault, code, words):
    result = script(LOOP.format(fault=fault))
    assert result.returncode == code, result
    assert "Traceback (most recent call last)" in result.stderr and re.search(words, result.stderr), result


@pytest.mark.parametrize("first", (MESH_FIRST, MPI_FIRST), ids=("mesh-first", "mpi-first"))
def test_an_exception_on_one_rank_ends_the_job_and_names_the_rank(script, first):
    result = script(first + LOOP.format(fault="fail()"))
    assert result.returncode == 1, result
    told = "hpctrain: rank 1 of 3 failed and ends the job:\nTraceback (most recent call last)"
    assert told in result.stderr and "ValueError: boom" in result.stderr, result


def test_a_hook_that_collects_what_is_said_does_not_keep_it(script):
    """torch.distributed's does so, where init_process_group comes after Mesh."""
    body = """
    import io
    mesh, ours = Mesh(), sys.excepthook
    def collect(*failure):
        real, sys.stderr = sys.stderr, io.StringIO()
        try:
            ours(*failure)
        finally:
            sys.stderr = real
    sys.excepthook = collect
    if mesh.rank == 1:
        fail()
    mesh.barrier()
    """
    result = script(body)
    assert result.returncode == 1 and result.stderr.count("ValueError: boom") == 1, result
    assert "rank 1 of 3 failed" in result.stderr, result


def test_the_guard_also_holds_in_a_with_block_and_for_exits(script):
    body = "with abort_on_error():\n" + textwrap.indent(LOOP.format(fault="happens(); sys.exit(3)"), "    ")
    result = script(body)
    assert result.returncode == 3 and "SystemExit: 3" in result.stderr, result
    result = script("with Mesh() as mesh:\n    mesh.rank == 1 and fail()\n    mesh.barrier()")
    assert result.returncode == 1 and "ValueError: boom" in result.stderr, result


def test_a_rank_that_cannot_start_mpi_ends_the_job(script):
    body = """
    from hpctrain.comm.environment import announced
    if announced(os.environ).rank == 1:
        happens()
        sys.modules["mpi4py"] = None
    Mesh()
    """
    result = script(body)
    assert result.returncode not in (0, None) and "cannot start MPI" in result.stderr, result


@pytest.mark.parametrize(
    "first, end, code",
    [
        (MESH_FIRST, "", 0),
        (MPI_FIRST, "", 0),
        (MESH_FIRST, "mesh.close()", 0),
        (MESH_FIRST, "left = AllReduce(mesh).start(np.ones(100_000), 'left under way')", 0),
        (MESH_FIRST, "mesh.close(); again = Mesh()", 0),
        (MESH_FIRST, "sys.exit(2)", 2),
    ],
)
def test_an_end_of_all_ranks_is_quiet_and_keeps_its_code(script, first, end, code):
    result = script(first + LOOP.format(fault="pass") + end)
    assert result.returncode == code, result
    if not code or vendor(mpirun()[0]) == "MPICH":
        assert result.stderr == "", result


def test_a_child_process_that_fails_is_not_the_end_of_its_rank(script):
    body = LOOP.format(
        fault="""
        if os.fork() == 0:
            try:
                sys.excepthook(ValueError, ValueError("of a child"), None)
            finally:
                os._exit(0)
        os.wait()
        """
    )
    result = script(body)
    assert result.returncode == 0 and "of a child" in result.stderr, result


TRAINING = """
import torch
from hpctrain import DataParallel, Sampler
mesh = Mesh()
model = DataParallel(torch.nn.Linear(2, 1), mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = Sampler(12, mesh)
for _ in range(2):
    for row in sampler:
        if mesh.rank == 1 and row == {row}:
            fail()
        optimizer.zero_grad()
        model(torch.full((1, 2), float(row))).pow(2).sum().backward()
        optimizer.step()
print("rank", mesh.rank, "of", mesh.size, "done")
"""


def test_a_training_loop_ends_when_one_rank_raises(script):
    result = script(TRAINING.format(row="sampler._order(1)[1]"))
    assert result.returncode == 1 and "ValueError: boom" in result.stderr and "done" not in result.stdout, result


@pytest.mark.parametrize("fails", ("step == 2", "step >= 2"), ids=("once", "from then on"))
def test_a_loop_that_goes_on_after_any_exception_of_one_rank_comes_to_an_end(script, fails):
    body = f"""
    import torch
    from hpctrain import DataParallel
    mesh = Mesh()
    model = DataParallel(torch.nn.Linear(2, 1), mesh)
    for step in range(5):
        try:
            if mesh.rank == 1 and {fails}:
                raise MemoryError("no memory left")
            model(torch.ones(1, 2)).sum().backward()
        except Exception as error:
            print(mesh.rank, type(error).__name__, flush=True)
    happens()
    """
    result = script(body, n=2)
    times = 1 if "==" in fails else 3
    assert result.returncode == 1 and result.stdout.splitlines().count("1 MemoryError") == times, result
    assert "CollectiveMismatch: ranks disagree: " in result.stderr, result
    assert re.search(r"rank 0 call \d+ .*'backward of model 0'", result.stderr), result
    assert re.search(r"rank 1 call \d+ close", result.stderr), result


def test_alone_it_needs_no_mpi_and_fails_like_any_script(script, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('mpi4py must not be needed')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    result = script(TRAINING.format(row=-1), n=0, PYTHONPATH=path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "rank 0 of 1 done\n", ""), result
    result = script("Mesh()\nfail()", n=0, PYTHONPATH=path)
    assert result.returncode == 1 and result.stderr.endswith("ValueError: boom\n"), result


def test_alone_on_purpose_under_a_launcher(script):
    result = script("mesh = Mesh(); print(mesh.rank, mesh.size)", n=2, HPCTRAIN_MPI="0")
    figures = "".join(sorted("".join(result.stdout.split())))  # two processes that know nothing of each other print
    assert result.returncode == 0 and figures == "0011", result


@pytest.mark.parametrize("first", ["everybody = Mesh()", "from mpi4py import MPI"])
def test_arrays_of_several_groups_that_are_still_held_do_not_keep_the_end(script, first):
    """Open MPI frees their windows itself: each rank in the order of its own table, which is not that of the others."""
    body = f"""
    {first}
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    pair, one, two = Mesh(world.Split(world.rank < 2)), Mesh(world), Mesh(world)
    held = [one.data.allocate(100)]
    pair.close()
    held.append(two.data.allocate(100))
    one.close()
    two.close()
    """
    result = script(body)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), result


def test_memory_that_came_after_the_mesh_goes_with_the_mesh(script):
    """A first window later than the mesh: where /dev/shm had no room for it at once, say."""
    body = """
    import hpctrain.comm.mesh as module
    join, module.join_node = module.join_node, lambda ring, **how: None
    mesh = Mesh()
    module.join_node = join
    group = mesh.add_group()
    assert group.ring.node is not None
    """
    result = script(body)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), result


def test_a_rank_that_waits_for_one_that_does_not_come_says_so(script):
    """As where hosts do not reach each other; rank 1 comes once rank 0 has said it."""
    body = """
    from mpi4py import MPI
    import hpctrain.comm.progress as progress
    progress.LATE_SECONDS = 0.0
    told = Path("told")

    class Told:
        def __getattr__(self, name):
            return getattr(sys.__stderr__, name)
        def write(self, text):
            told.touch()
            return sys.__stderr__.write(text)

    sys.stderr = Told()
    while MPI.COMM_WORLD.rank == 1 and not told.exists():
        time.sleep(0.01)
    Mesh()
    """
    result = script(body, n=2)
    assert result.returncode == 0 and "hpctrain: rank 0 of 2, on " in result.stderr, result
    assert "FI_TCP_IFACE" in result.stderr and "OMPI_MCA_btl_tcp_if_include" in result.stderr, result


@pytest.mark.parametrize("first", (MESH_FIRST, MPI_FIRST), ids=("mesh-first", "mpi-first"))
def test_a_fork_while_mpi_runs_is_told_once_with_what_to_do_instead(script, first):
    body = f"""
    {first.strip()}
    import multiprocessing, subprocess
    mesh = Mesh()
    subprocess.run(["true"], check=True)
    if mesh.rank == {{rank}}:
        for _ in range(2):
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
    """
    told = script(body.format(rank=0), n=2)
    assert told.returncode == 0 and told.stderr.count("forked while MPI runs") == 1, told
    assert 'multiprocessing_context="forkserver"' in told.stderr, told
    assert script(body.format(rank=9), n=2).stderr == ""


def test_a_process_that_a_rank_leaves_behind_is_named(script):
    """The launcher waits until it has ended, which it does once it was named."""
    body = """
    import subprocess
    mesh = Mesh()
    if mesh.rank == 1:
        subprocess.Popen(["sh", "-c", "until [ -e named ]; do sleep 0.05; done"])
        subprocess.run(["true"], check=True)

    class Named:
        def __getattr__(self, name):
            return getattr(sys.__stderr__, name)
        def write(self, text):
            Path("named").touch()
            return sys.__stderr__.write(text)

    sys.stderr = Named()
    """
    result = script(body)
    assert result.returncode == 0, result
    assert re.fullmatch(
        r"hpctrain: rank 1 ends, and the launcher waits for what it started: \d+ \(sh -c .*\)\n", result.stderr
    )
