"""What follows from the numbers of ranks, stages and rows: how many micro-batches, who computes which, what fits."""

from dataclasses import replace

from hpctrain.comm.channel import MAX_LANES
from hpctrain.config import Config, UsageError
from hpctrain.config.servers import read_straggler
from hpctrain.plan import grid as grids
from hpctrain.plan.grid import Grid
from hpctrain.plan.program import check
from hpctrain.plan.schedule import SCHEDULES, Place

MICROBATCHES_A_STAGE = 4  # by default: a bubble of a fifth


def settled(config: Config, num_ranks: int) -> Config:
    """`config` with what it leaves open filled in. UsageError for a layout that these ranks cannot have."""
    grid = grid_of(config, num_ranks)
    num_replicas = grid.num_replicas
    if config.straggler is not None and (read_straggler(config.straggler).rank or 0) >= grid.num_ranks:
        last = grid.num_ranks - 1
        raise UsageError(f"--straggler {config.straggler}: ranks 0 to {last} train; give one of them, or any")
    chunks = config.chunks or (2 if SCHEDULES[config.schedule].has_chunks else None)
    rows = -(-config.global_batch_size // num_replicas)
    if config.micro_batch_size is not None:
        pieces = -(-rows // config.micro_batch_size)
    else:
        pieces = config.num_microbatches or default_microbatches(config, rows)
    if (chunks or 1) > MAX_LANES // 2:
        raise UsageError(f"--chunks {chunks}: at most {MAX_LANES // 2}")
    compress = "bf16" if config.reduce_dtype == "bfloat16" else config.compress
    how = {"compress": compress, "reduce_dtype": None}
    config = replace(config, chunks=chunks, num_microbatches=pieces, micro_batch_size=None, **how)
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
    """Of the ranks that train. UsageError where there are none, or where they do not divide by the stages."""
    if config.servers:
        if config.servers >= num_ranks:
            ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
            leave = "leaves" if num_ranks == 1 else "leave"
            raise UsageError(f"--servers {config.servers}: {ranks} {leave} none to train; start more, as mpirun -n 8")
        return grids.grid_of(num_ranks - config.servers, 1)
    try:
        return grids.grid_of(num_ranks, config.stages, config.rank_order)
    except ValueError as error:
        raise UsageError(f"--stages {config.stages}: {error}") from None


def place_of(config: Config, stage: int, num_updates: int = 1) -> Place:
    """A stage's place in the pipeline of a settled configuration."""
    return Place(stage, config.stages, config.num_microbatches, num_updates, config.chunks or 1, config.pipeline_warmup)
