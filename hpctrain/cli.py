"""Subcommands: which there are, which one is meant, and the help that needs no MPI."""

import multiprocessing
import sys
from importlib import import_module
from multiprocessing import forkserver

from hpctrain import __version__, config

COMMANDS = {  # what it is for, and the module that has its run(argv, comm)
    "train": ("train a model (the default command)", "hpctrain.train.command"),
    "evaluate": (
        "metrics of a run's weights: evaluate RUN [--data PATH] [--split eval|train|all] [--batches N]",
        "hpctrain.tools.evaluate",
    ),
    "export": ("a run's weights by the module's own names: export RUN OUT.safetensors", "hpctrain.tools.export"),
    "report": ("a picture and a page of a run: report RUN [--out FOLDER]", "hpctrain.tools.report"),
    "plan": (
        "what schedules cost, before anything runs: plan --stages S --num-microbatches M [--schedule NAME]",
        "hpctrain.tools.plan",
    ),
    "profile": (
        "seconds of each layer, for --stage-split: profile COSTS.json [flags of train]",
        "hpctrain.tools.profile",
    ),
    "tune": (
        "what sums and buckets take on these ranks, for --tuning: tune --out FILE [--task NAME and flags of train]",
        "hpctrain.tools.tune",
    ),
    "submit": (
        "a job for Slurm, which goes on until it is done: submit --nodes 2 [--dry-run] -- [flags of train]",
        "hpctrain.launch.submit",
    ),
    "launch": (
        "mpirun, started again from the last checkpoint until the run is done: launch -n 8 -- [flags of train]",
        "hpctrain.launch.supervise",
    ),
    "files": ("the job scripts that come with the package: files [FOLDER]", "hpctrain.tools.files"),
    "doctor": (
        "what MPI, ranks, GPUs and machine make of each other: doctor [--require cuda] [--prove]",
        "hpctrain.tools.doctor",
    ),
}


def main(argv: list[str], comm) -> int:
    """Runs a command on all ranks of `comm` (None: this process alone); returns the exit code that all agree on."""
    command, rest = split_command(argv)
    if command in COMMANDS:
        return import_module(COMMANDS[command][1]).run(rest, comm)
    if comm is None or comm.rank == 0:
        print(f"hpctrain: {command}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def split_command(argv: list[str]) -> tuple[str, list[str]]:
    """The subcommand, `train` where none is named, and what is left for it."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return "train", argv


def before_mpi(argv: list[str]) -> None:
    """Starts what must not be forked from a process with MPI: the server that --loader-workers are forked from."""
    command, rest = split_command(argv)
    try:
        num_workers = config.parse(rest)[0].loader_workers if command == "train" else 0
    except config.UsageError:
        return  # which one rank will tell
    if num_workers:
        multiprocessing.set_forkserver_preload(["torch.utils.data"])
        forkserver.ensure_running()


def answer(argv: list[str]) -> None:
    """Prints the version, the help of a command that has flags of its own, or the help of all."""
    if "--version" in argv:
        print(f"hpctrain {__version__}")
        return
    command, _ = split_command(argv)
    named = command in COMMANDS and command != "train"  # whose flags are below, from a module that needs no NumPy
    parser = getattr(import_module(COMMANDS[command][1]), "parser", None) if named else None
    if parser is not None:
        print(parser().format_help(), end="")
        return
    print("usage: python -m hpctrain [command] [flags]        one process")
    print("       mpirun -n 8 python -m hpctrain [flags]      8 ranks: 8 replicas, with --stages S a pipeline")
    print("\ncommands:")
    for command, (text, _) in COMMANDS.items():
        print(f"  {command:10} {text}")
    print("\nflags of train:\n" + config.parser().format_help().partition("options:\n")[2], end="")
    codes = "0 done, 1 error, 2 usage, 75 saved on request, 76 stalled, 77 rank lost"
    print(f"\nalso: -h, --help; --version. Exit codes: {codes}.")
