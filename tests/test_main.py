"""The start: what is said before MPI can end the process by itself."""

import pytest

from hpctrain import __main__ as program
from hpctrain.comm import start
from hpctrain.comm.environment import Announced

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
