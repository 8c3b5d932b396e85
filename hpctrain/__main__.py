"""`python -m hpctrain`: starts MPI where a launcher announced it, before anything heavy, then runs the command under
a guard.

The order matters: a rank that fails before MPI_Init leaves the others waiting in it, so nothing that can fail comes
first.
"""

import os
import sys
import warnings

from hpctrain.comm import environment
from hpctrain.comm.abort import abort_on_error, leave

LITTLE_SHARED_MEMORY = 16 << 20  # bytes; 8 ranks of MPICH take 8 MiB
ANSWERS = ("-h", "--help", "--version")  # need no MPI, and one rank to answer


def main() -> None:
    with abort_on_error():
        argv = sys.argv[1:]
        code = answer(argv) if any(word in ANSWERS for word in argv) else run(argv)
    leave(code)


def answer(argv: list[str]) -> int:
    """Help or version, printed by one rank, without MPI."""
    from hpctrain import cli

    if environment.announced(os.environ).rank in (None, 0):
        try:
            cli.answer(argv)
            sys.stdout.flush()
        except BrokenPipeError:  # `--help | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run(argv: list[str]) -> int:
    from hpctrain import cli

    comm = None
    try:
        if environment.wants_mpi(os.environ):
            comm = start_mpi()
    except ValueError as error:
        if argv[:1] != ["doctor"]:  # which explains what is refused here
            return refuse(str(error))
    return cli.main(argv, comm)


def start_mpi():
    """The world communicator. Raises ValueError where it is not the world that the launcher announced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mpi4py has a word on foreign launchers too; ours says more, and refuses
        MPI = load_mpi()
        said, library = environment.announced(os.environ), MPI.Get_library_version()
        if os.environ.get(environment.SWITCH) != "1":
            environment.check_launcher(said, library)
        warn_of_little_shared_memory(said)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    environment.check_world(said, MPI.COMM_WORLD.size, library)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.rank == 0:
        print("MPI grants less than MPI_THREAD_MULTIPLE: some libraries then wait 100 times slower", file=sys.stderr)
    return MPI.COMM_WORLD


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


def refuse(message: str) -> int:
    """Without MPI no rank knows whether it is the only one in trouble, so each says it."""
    rank = environment.announced(os.environ).rank
    print(f"{'' if rank is None else f'[rank {rank}] '}hpctrain: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
