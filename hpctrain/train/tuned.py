"""What a run takes of a file that `tune` wrote: decided on rank 0, before the first step, and noted in config.toml.

There the values stand in place of the file's name, so that the run can be repeated bit for bit when the file is gone.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace

from hpctrain.comm.tuning import read_tuning
from hpctrain.config import Config
from hpctrain.plan.tuning import Tuning, constants_of
from hpctrain.train.layout import grid_of


def tuned(config: Config, given: set[str]) -> tuple[Config, Tuning]:
    """The configuration with values in place of a file's name, and what a mesh is to have.

    `given`: flags that win over the file. ValueError, one line, for a file that cannot be used.
    """
    if config.tuning is None:
        return config, Tuning()
    if isinstance(config.tuning, dict):
        return config, Tuning(constants_of(config.tuning))
    tuning = read_tuning(config.tuning, "--tuning")
    taken = replace(config, tuning=asdict(tuning.constants))
    if tuning.bucket_bytes is not None and "bucket_bytes" not in given:
        taken = replace(taken, bucket_bytes=tuning.bucket_bytes)
    return taken, tuning


def tuning_notes(config: Config, tuning: Tuning, given: set[str], num_ranks: int) -> Iterator[str]:
    """Lines about a file of which nothing has an effect. `config` as `tuned` gave it."""
    if "tuning" not in given:
        return
    if grid_of(config, num_ranks).num_replicas == 1:
        yield "--tuning has no effect: nothing is summed up where there is one replica"
    elif tuning.bucket_bytes is None or "bucket_bytes" in given:
        if config.shard_optimizer:
            yield "--tuning has no effect with --shard-optimizer, but for a size of buckets"
        elif config.allreduce in ("ring", "doubling"):
            yield f"--tuning has no effect with --allreduce {config.allreduce}, but for a size of buckets"


def figures(config: Config) -> dict | None:
    """What the summary says: the constants by which `auto` chose, and the size of buckets; None without a tuning."""
    return {**config.tuning, "bucket_bytes": config.bucket_bytes} if isinstance(config.tuning, dict) else None
