"""The flags of a training that may be started again and again: checked before anything starts, and completed."""

from __future__ import annotations

from typing import Any

from hpctrain.config import Config, Parser, UsageError, parse
from hpctrain.config import parser as parser_of_train
from hpctrain.plan.grid import grid_of

CHECKPOINT_EVERY = 100  # steps, where neither flags nor their file say


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """A command's own flags, and those of train behind `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def parse_own(parser: Parser, argv: list[str]) -> dict[str, Any]:
    """A command's own flags, by name. UsageError, which says so where a flag of train is among them."""
    own = {name for action in parser._actions for name in action.option_strings}
    of_train = {name for action in parser_of_train()._actions for name in action.option_strings}
    for word in argv:
        name = word.partition("=")[0]
        if name in of_train - own:
            raise UsageError(f"{name}: is a flag of train; give it behind --, as in -- {name} ...")
    return parser.parse(argv)


def checked(flags: list[str], num_ranks: int) -> Config:
    """What `flags` of train ask for. UsageError for what so many ranks would refuse, or what could not go on."""
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]}: after -- come the flags of train, without a command")
    config, _ = parse(flags)
    if config.resume not in (None, "auto"):
        raise UsageError(
            f"--resume {config.resume}: leave it out, --resume auto is added; to go on with a run, give its --run-dir"
        )
    if config.servers >= num_ranks:
        raise UsageError(f"--servers {config.servers}: of {num_ranks} in all that leaves no rank to train")
    try:
        grid_of(num_ranks - config.servers, config.stages)
    except ValueError as error:
        raise UsageError(f"--stages {config.stages}: {error}") from None
    return config


def added(config: Config) -> list[str]:
    """What makes a command one that goes on where it was, however often it is given."""
    every = [] if config.checkpoint_every else ["--checkpoint-every", str(CHECKPOINT_EVERY)]
    return [*every, *([] if config.resume else ["--resume", "auto"])]


def layout(config: Config, num_ranks: int) -> str:
    """In words: `8 ranks: 2 stages x 4 replicas`."""
    stages, replicas = config.stages, (num_ranks - config.servers) // config.stages
    numbers = {"stage": stages, "replica": replicas, "server": config.servers}
    parts = {name: f"{number} {name}{'' if number == 1 else 's'}" for name, number in numbers.items()}
    servers = f", {parts['server']}" if config.servers else ""
    return f"{num_ranks} rank{'' if num_ranks == 1 else 's'}: {parts['stage']} x {parts['replica']}{servers}"
