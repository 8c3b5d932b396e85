"""Which settings of a parameter server go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpctrain.config.values import UsageError
from hpctrain.plan.schedule import SCHEDULES

if TYPE_CHECKING:
    from hpctrain.config.settings import Config

WITH_SERVERS = ("staleness", "update", "aggregate", "delay", "delay_window", "dense_via", "adapt_lr", "record_log")
AGGREGATES = ("mean", "sum", "median", "trimmed-mean")
ANYWHERE = AGGREGATES[:2]  # that need no whole round


class Straggler(NamedTuple):
    """`rank` None: any. Its computing takes `factor` times as long, in a step with this probability."""

    rank: int | None
    factor: float
    probability: float = 1.0


def check_servers(config: Config) -> None:
    """UsageError, one line, for what servers cannot do, or what is of no use without them."""
    if config.straggler is not None:
        read_straggler(config.straggler)
    if not config.servers:
        for name in WITH_SERVERS:
            if getattr(config, name) != type(config).__dataclass_fields__[name].default:
                value = getattr(config, name)
                shown = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
                raise UsageError(f"--{name.replace('_', '-')}{shown}: needs --servers, as in --servers 1")
        return
    if config.stages > 1:
        raise UsageError(
            f"--servers {config.servers}: each worker holds all layers; leave --stages {config.stages} out"
        )
    if not SCHEDULES[config.schedule].flushes:
        raise UsageError(f"--servers {config.servers}: --schedule {config.schedule} is for stages; take 1f1b")
    if config.on_nan == "skip":
        raise UsageError("--on-nan skip: with --servers no worker waits for all to agree; take stop")
    of_the_ring = {
        f"--allreduce {config.allreduce}": config.allreduce != "auto",
        "--tuning": config.tuning is not None,
        f"--compress {config.compress}": config.compress != "none",
        f"--reduce-dtype {config.reduce_dtype}": config.reduce_dtype == "bfloat16",
    }
    flag = next((flag for flag, is_given in of_the_ring.items() if is_given), None)
    if flag is not None and config.dense_via == "ps":
        raise UsageError(f"{flag}: gradients go to the --servers; leave it out, or take --dense-via ring")
    _check_staleness(config)
    _check_update(config)


def _check_staleness(config: Config) -> None:
    if config.staleness != float("inf") and config.staleness != int(config.staleness):
        raise UsageError(f"--staleness {config.staleness:g}: expected a whole number of rounds, or inf")
    file, _, function = config.aggregate.rpartition(":")
    if config.aggregate not in AGGREGATES and not (file.endswith(".py") and function):
        raise UsageError(f"--aggregate {config.aggregate}: expected {', '.join(AGGREGATES)} or FILE.py:function")
    if config.staleness and config.aggregate not in ANYWHERE:
        raise UsageError(
            f"--aggregate {config.aggregate}: needs the pushes of a whole round, so --staleness 0; mean and sum do not"
        )
    if config.dense_via == "ring" and (config.delay or config.delay_window):
        flag = f"--delay {config.delay}" if config.delay else f"--delay-window {config.delay_window}"
        raise UsageError(f"{flag}: the ring has no old weights to compute with; take --dense-via ps")
    if config.adapt_lr and not config.staleness:
        raise UsageError("--adapt-lr: with --staleness 0 no update overtakes another; give a bound above 0")
    if config.delay and config.delay_window:
        raise UsageError(
            f"--delay {config.delay}: leave --delay-window {config.delay_window} out, they exclude each other"
        )


def _check_update(config: Config) -> None:
    if config.update == "worker":
        for name in ("staleness", "delay", "delay_window"):
            if value := getattr(config, name):
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} {value:g}: with --update worker all copies step together; take 0")
        if config.dense_via == "ring":
            raise UsageError(
                "--dense-via ring: the servers then hold tables alone, and step them; take --update server"
            )
    elif config.clip_norm is not None and config.dense_via == "ps":
        raise UsageError(
            f"--clip-norm {config.clip_norm}: no server sees the whole gradient; workers do with --update worker"
        )
    elif config.clip_norm is not None:
        raise UsageError(f"--clip-norm {config.clip_norm}: the gradient of the tables is on the servers; leave it out")


def read_straggler(text: str) -> Straggler:
    """Of RANK:FACTOR or RANK:FACTOR:PROBABILITY. UsageError for anything else."""
    rank, _, rest = text.partition(":")
    factor, _, probability = rest.partition(":")
    try:
        found = Straggler(None if rank == "any" else int(rank), float(factor), float(probability or 1))
    except ValueError:
        found = Straggler(-1, 0)
    if (found.rank is None or found.rank >= 0) and 1 <= found.factor < 1e6 and 0 <= found.probability <= 1:
        return found
    raise UsageError(f"--straggler {text}: expected RANK:FACTOR or RANK:FACTOR:PROBABILITY, such as 3:4 or any:4:0.1")
