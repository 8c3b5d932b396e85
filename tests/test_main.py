"""The start: what is said before MPI can end the process by itself."""

import pytest

import hpctrain
from hpctrain import __main__ as program
from hpctrain.comm import start
from hpctrain.comm.environment import Announced
from tests.harness.launch import run_python

GIB = 1 << 30


@pytest.mark.parametrize(
    "free, rank, told",
    [(GIB, 0, ""), (1 << 20, 0, "only 1 MiB free in /dev/shm"), (None, None, "no /dev/shm"), (1 << 20, 3, "")],
)
def test_little_shared_memory_is_told_once_and_before_it_hurts(free, rank, told, monkeypatch, capsys):
    monkeypatch.setattr(start.environment, "shared_memory_free", lambda: free)
    start.warn_of_little_shared_memory(Announced(8, rank, "PMI_SIZE", "mpirun of MPICH"))
    said = capsys.readouterr().err
    assert told in said and bool(said) == bool(told) and said.count("\n") <= 1


def test_help_into_a_closed_pipe_is_no_error(monkeypatch):
    def closed(argv):
        raise BrokenPipeError

    monkeypatch.setattr("hpctrain.cli.answer", closed)
    monkeypatch.setattr(program.os, "dup2", lambda *_: None)
    with open("/dev/null", "w") as nobody:
        monkeypatch.setattr(program.sys, "stdout", nobody)
        assert program.answer(["--help"]) == 0


def test_the_package_loads_nothing_until_it_is_asked_and_then_all_that_it_names():
    code = """
import subprocess
import sys
import hpctrain
assert not {"numpy", "torch", "mpi4py"} & sys.modules.keys(), "too much"
assert set(hpctrain.__all__) <= set(dir(hpctrain))
from hpctrain import AllReduce, Mesh, abort_on_error
assert not {"torch", "mpi4py"} & sys.modules.keys(), "too much"
from hpctrain import *
assert hpctrain.DataParallel is DataParallel and hpctrain.Sampler is Sampler
"""
    result = run_python("-c", code, timeout=60)
    assert result.returncode == 0, result


def test_a_name_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(AttributeError, match="no attribute 'DataParalel'; there are AllReduce, DataParallel, "):
        _ = hpctrain.DataParalel


def test_the_server_that_readers_are_forked_from_starts_before_mpi():
    """A process that is forked after MPI has started may hang in it."""
    program = """
import sys
from multiprocessing import forkserver
from hpctrain import __main__, cli, config
order = []
__main__.start_mpi = lambda: order.append("mpi")
forkserver.ensure_running = lambda: order.append("server")
cli.main = lambda argv, comm: 0
__main__.environment.wants_mpi = lambda environ: True
for argv in (["--loader-workers", "1"], ["--steps", "3"], ["doctor"], ["--loader-workers", "x"]):
    order.append(argv[0])
    __main__.run(argv)
print(*order)
"""
    ended = run_python("-c", program, timeout=60)
    assert ended.stdout == "--loader-workers server mpi --steps mpi doctor mpi --loader-workers mpi\n"
