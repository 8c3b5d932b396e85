"""`python -m tests.failing.struck PLACES flags...`: as `python -m hpctrain`, where ranks get a signal at a place.

`1@hpctrain.train.run:final_weights+0@hpctrain.train.run:save:2:STOP`: rank 1 is killed as it calls that, rank 0 is
stopped as it calls that for the second time; `LOSS`: it hears of a loss at the end of that. A function is named where
it is called from.
"""

import functools
import os
import runpy
import signal
import sys
from importlib import import_module


def strike(place: str) -> None:
    """Lays the trap that `place` describes, where this is the rank."""
    rank, _, where = place.partition("@")
    if rank != os.environ.get("OMPI_COMM_WORLD_RANK"):
        return
    module, name, number, what = [*where.split(":"), *("1", "KILL")[where.count(":") - 1 :]]
    owner = import_module(module)
    *path, name = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    struck, calls = getattr(owner, name), iter(range(1, 10**9))

    @functools.wraps(struck)
    def call(*args, **kwargs):
        if next(calls) == int(number):
            if what == "LOSS":
                struck(*args, **kwargs)
                fail()
            os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
        return struck(*args, **kwargs)

    setattr(owner, name, call)


def fail() -> None:
    """As where another rank is lost."""
    from mpi4py import MPI

    raise MPI.Exception(MPI.ERR_PROC_FAILED)


if __name__ == "__main__":
    for each in sys.argv.pop(1).split("+"):
        strike(each)
    runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
