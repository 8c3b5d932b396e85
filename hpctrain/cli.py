"""Subcommands: which there are, which one is meant, and the help that needs no MPI."""

import sys
from importlib import import_module

from hpctrain import __version__, config

COMMANDS = {"train": "train a model (the default command)", "doctor": "what MPI, ranks and machine make of each other"}


def main(argv: list[str], comm) -> int:
    """Runs a command on all ranks of `comm` (None: this process alone); returns the exit code that all agree on."""
    rank = comm.rank if comm is not None else 0
    command, rest = split_command(argv)
    if command == "doctor":
        return import_module("hpctrain.tools.doctor").run(rest, comm)
    if command == "train":
        return import_module("hpctrain.train.command").run(rest, comm)
    if rank == 0:
        print(f"hpctrain: {command}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def split_command(argv: list[str]) -> tuple[str, list[str]]:
    """The subcommand, `train` where none is named, and what is left for it."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return "train", argv


def answer(argv: list[str]) -> None:
    """Prints the version or the help."""
    if "--version" in argv:
        print(f"hpctrain {__version__}")
        return
    print("usage: python -m hpctrain [command] [flags]        one process")
    print("       mpirun -n 8 python -m hpctrain [flags]      8 ranks: a ring of 8 replicas\n\ncommands:")
    for command, text in COMMANDS.items():
        print(f"  {command:10} {text}")
    print("\nflags of train:\n" + config.parser().format_help().partition("options:\n")[2], end="")
    print("\nalso: -h, --help; --version. Exit codes: 0 done, 1 error, 2 usage.")
