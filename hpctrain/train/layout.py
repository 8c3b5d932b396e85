"""What follows from the numbers of ranks, stages and rows: how many micro-batches, who computes which, what fits."""

from dataclasses import replace

from hpctrain.config import Config, UsageError
from hpctrain.plan.grid import Grid
from hpctrain.plan.program import check
from hpctrain.plan.schedule import SCHEDULES, Place

MICROBATCHES_A_STAGE = 4  # by default: a bubble of a fifth


def settled(config: Config, num_ranks: int) -> Config:
    """`config` with what it leaves open filled in. UsageError for a layout that these ranks cannot have."""
    grid = grid_of(config, num_ranks)
    chunks = config.chunks or (2 if SCHEDULES[config.schedule].has_chunks else 1)
    rows = -(-config.global_batch_size // grid.num_replicas)
    if config.micro_batch_size is not None:
        pieces = -(-rows // config.micro_batch_size)
    else:
        pieces = config.num_microbatches or default_microbatches(config, rows)
    config = replace(config, chunks=chunks, num_microbatches=pieces, micro_batch_size=None)
    try:
        check(config.schedule, place_of(config, 0))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return config


def default_microbatches(config: Config, rows: int) -> int:
    """One, where pieces bring nothing; else some for each stage, as far as `rows` of a replica go."""
    if config.stages == 1 or config.schedule == "naive":
        return 1
    pieces = max(1, min(MICROBATCHES_A_STAGE * config.stages, rows))
    if SCHEDULES[config.schedule].has_chunks:
        return max(config.stages, pieces - pieces % config.stages)
    return max(config.stages, pieces) if config.schedule == "2bw" else pieces


def grid_of(config: Config, num_ranks: int) -> Grid:
    """UsageError where the ranks do not divide by the stages."""
    if num_ranks % config.stages:
        fitting = ", ".join(str(stages) for stages in range(1, num_ranks + 1) if num_ranks % stages == 0)
        raise UsageError(f"--stages {config.stages}: {num_ranks} ranks do not divide by it; {fitting} would do")
    return Grid(config.stages, num_ranks // config.stages, config.rank_order)


def place_of(config: Config, stage: int, num_updates: int = 1) -> Place:
    """A stage's place in the pipeline of a settled configuration."""
    return Place(stage, config.stages, config.num_microbatches, num_updates, config.chunks, config.pipeline_warmup)
