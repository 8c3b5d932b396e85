"""How a process comes to its ranks: MPI is started where a launcher announced it, and only there.

A program without a launcher is one process and needs no MPI library; one under a launcher that does not fit is refused
here, before MPI_Init would end it unexplained.
"""

import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.comm import abort, environment
from hpctrain.comm.children import watch_children
from hpctrain.comm.progress import LATE_SECONDS

OPEN_MPI_ONE_SIDED = "OMPI_MCA_osc"  # what moves data between its windows; through ours none is moved
OPEN_MPI_LEAVES = "OMPI_MCA_async_mpi_finalize"  # MPI_Finalize without its own fence: after losses that may never end
START_SECONDS = 600.0  # in which all ranks are in MPI_Init; where one may be lost, nothing else ends the others there
LITTLE_SHARED_MEMORY = 16 << 20  # bytes; 8 ranks of MPICH take 8 MiB


def join_launch():
    """The communicator of all ranks of this launch, None where this process is alone; for programs of users.

    The same rule as `python -m hpctrain`; MPI that the program has started already is used as it is. From here on an
    uncaught exception on any rank ends all of them, and the end of the program is a collective call. Raises ValueError
    where MPI cannot be started, or is not the world that the launcher announced.
    """
    wanted = environment.wants_mpi(os.environ)
    if os.environ.get(environment.SWITCH) == "0":
        return None
    MPI = sys.modules.get("mpi4py.MPI")
    running = MPI is not None and MPI.Is_initialized()
    if wanted or running and MPI.COMM_WORLD.size > 1:
        abort.guard()  # first: a rank that fails before MPI_Init leaves the others in it
    if running:
        environment.check_world(environment.announced(os.environ), MPI.COMM_WORLD.size, MPI.Get_library_version())
        watch_children(MPI.COMM_WORLD.rank)
        return MPI.COMM_WORLD
    if not wanted:
        return None
    world = start_mpi()
    abort.at_exit(abort.finalize)
    return world


def start_mpi():
    """The world communicator. Raises ValueError where it is not the world that the launcher announced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mpi4py has a word on foreign launchers too; ours says more, and refuses
        MPI = load_mpi()
        said, library = environment.announced(os.environ), MPI.Get_library_version()
        if os.environ.get(environment.SWITCH) != "1":
            environment.check_launcher(said, library)
        warn_of_little_shared_memory(said)
        os.environ.setdefault(OPEN_MPI_ONE_SIDED, "^ucx")  # which warns of itself at each window where it has no use
        limit = None
        if environment.is_mitigating(os.environ):
            limit = START_SECONDS
            os.environ.setdefault(OPEN_MPI_LEAVES, "1")  # all that are left have agreed to leave before it
        with within(limit, "MPI_Init does not end; was a rank lost in it, or before?"):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    environment.check_world(said, MPI.COMM_WORLD.size, library)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.rank == 0:
        print("MPI grants less than MPI_THREAD_MULTIPLE: some libraries then wait 100 times slower", file=sys.stderr)
    watch_children(MPI.COMM_WORLD.rank)
    return MPI.COMM_WORLD


@contextmanager
def within(seconds: float | None, fault: str) -> Iterator[None]:
    """Ends this process, with a line and the code of a lost rank, where what is inside takes longer."""

    def end() -> None:
        print(f"hpctrain: {fault}", file=sys.stderr, flush=True)
        os._exit(abort.LOST)

    timer = threading.Timer(seconds or 0, end)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn_of_little_shared_memory(said: environment.Announced) -> None:
    """Where it runs out, an MPI library dies of a bus error without a word: have said it before."""
    free = environment.shared_memory_free()
    if said.rank in (None, 0) and (free is None or free < LITTLE_SHARED_MEMORY):
        there = "no /dev/shm" if free is None else f"only {free >> 20} MiB free in /dev/shm"
        print(
            f"hpctrain: {there}: MPI may end by a bus error; in a container: --shm-size=1g; "
            "else remove what killed jobs left there",
            file=sys.stderr,
        )


def tell_of_absence(rank: int, size: int) -> None:
    """Of a rank that waits for all to meet: where they do not reach each other MPI itself says nothing, and waits."""
    print(
        f"hpctrain: rank {rank} of {size}, on {socket.gethostname()}, has waited {LATE_SECONDS:g} s for all to come; if"
        " none is still busy elsewhere, hosts do not reach each other: name their network by FI_TCP_IFACE=eth0 or"
        " UCX_NET_DEVICES=eth0 (MPICH), OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI)",
        file=sys.stderr,
        flush=True,
    )


def load_mpi():
    """mpi4py's MPI, not yet initialised: where launcher and library do not fit, MPI_Init ends the process by itself."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f'cannot start MPI: {error}; pip install "hpctrain[mpi]", or HPCTRAIN_MPI=0 to run alone'
        ) from None
    return MPI
