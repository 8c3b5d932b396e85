"""`python -m hpctrain`: starts MPI where a launcher announced it, before anything heavy, then runs the command under
a guard.

The order matters: a rank that fails before MPI_Init leaves the others waiting in it, so nothing that can fail comes
first.
"""

import os
import sys

from hpctrain.comm import environment
from hpctrain.comm.abort import abort_on_error, leave
from hpctrain.comm.start import start_mpi

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

    cli.before_mpi(argv)
    comm = None
    try:
        if environment.wants_mpi(os.environ):
            comm = start_mpi()
    except ValueError as error:
        if argv[:1] != ["doctor"]:  # which explains what is refused here
            return refuse(str(error))
    return cli.main(argv, comm)


def refuse(message: str) -> int:
    """Without MPI no rank knows whether it is the only one in trouble, so each says it."""
    rank = environment.announced(os.environ).rank
    print(f"{'' if rank is None else f'[rank {rank}] '}hpctrain: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
