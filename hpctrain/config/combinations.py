"""Which settings go together: what is refused here would train something else, or nothing, hours later."""

from typing import TYPE_CHECKING

from hpctrain.config.values import UsageError
from hpctrain.plan.compression import goes_by, parse_compression
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.plan.tuning import constants_of

if TYPE_CHECKING:
    from hpctrain.config.settings import Config

# that a run keeps as it goes on
KEPT = ("task", "task_option", "data", "seed", "optimizer", "table_optimizer")


def check_schedule(config: "Config") -> None:
    """UsageError for what a schedule does not have."""
    schedule = SCHEDULES[config.schedule]
    if config.vertical_sync and config.schedule != "1f1b-async":
        raise UsageError(f"--vertical-sync: belongs to --schedule 1f1b-async, not to {config.schedule}")
    if config.pipeline_warmup != 1 and config.schedule not in ("1f1b", "zb-h1"):
        raise UsageError(f"--pipeline-warmup: belongs to --schedule 1f1b or zb-h1, not to {config.schedule}")
    if config.recompute and schedule.splits_backward:
        raise UsageError(f"--recompute: --schedule {config.schedule} keeps what it puts off; take 1f1b")
    if config.on_nan == "skip" and not schedule.flushes:
        raise UsageError(f"--on-nan skip: --schedule {config.schedule} never waits for all stages; take stop, or 1f1b")


def check_shard_optimizer(config: "Config") -> None:
    """UsageError for who steps otherwise."""
    if config.shard_optimizer and config.servers:
        raise UsageError(f"--shard-optimizer: leave --servers {config.servers} out, they step")
    if config.shard_optimizer and not SCHEDULES[config.schedule].flushes:
        raise UsageError(
            f"--shard-optimizer: --schedule {config.schedule} has no flush, at which weights come together; take 1f1b"
        )
    if config.shard_optimizer and config.allreduce not in ("auto", "ring"):
        raise UsageError(
            f"--shard-optimizer: sums and weights go along the ring; leave --allreduce {config.allreduce} out"
        )


def check_compress(config: "Config") -> None:
    """UsageError for what leaves nothing to compress, or no way to."""
    try:
        compression = parse_compression(config.compress)
    except ValueError as error:
        raise UsageError(f"--compress {config.compress}: {error}") from None
    if not compression.keeps_rest:
        return
    if config.shard_optimizer or config.servers:
        flag = "--shard-optimizer" if config.shard_optimizer else "--servers"
        raise UsageError(f"--compress {config.compress}: each replica steps with the whole sum; leave {flag} out")
    if not SCHEDULES[config.schedule].flushes:
        raise UsageError(
            f"--compress {config.compress}: --schedule {config.schedule} has no flush, at which all agree that a step"
            " was made; take 1f1b"
        )
    if not goes_by(compression.kind, config.allreduce):
        raise UsageError(
            f"--compress {config.compress}: what is sent goes along the ring; leave --allreduce {config.allreduce} out"
        )


def check_reduce_dtype(config: "Config") -> None:
    """UsageError where gradients are to travel in two ways."""
    other = {"float32": "none", "bfloat16": "bf16"}.get(config.reduce_dtype)
    if config.reduce_dtype is not None and config.compress not in ("none", other):
        raise UsageError(
            f"--reduce-dtype {config.reduce_dtype}: --compress {config.compress} says how gradients travel; give one"
        )
    if config.reduce_dtype == "float32" and config.precision == "float64":
        raise UsageError("--reduce-dtype float32: gradients of --precision float64 travel as they are; leave it out")


def check_rank_loss(config: "Config") -> None:
    """UsageError where a lost rank takes along what no other has."""
    if config.on_rank_loss == "stop":
        return
    if config.stages > 1:
        raise UsageError(f"--on-rank-loss continue: each rank holds all layers; leave --stages {config.stages} out")
    if config.shard_optimizer:
        raise UsageError("--on-rank-loss continue: each replica holds all that steps it; leave --shard-optimizer out")
    if config.allreduce == "windows":
        raise UsageError(
            "--on-rank-loss continue: no memory is shared with ranks that may be lost; leave --allreduce windows out"
        )


def check_tuning(values: dict) -> None:
    """UsageError for what cannot be the constants of a file that `tune` wrote."""
    try:
        constants_of(values)
    except ValueError as error:
        raise UsageError(f"tuning: {error}") from None


def early_stop_rule(text: str) -> tuple[str, int, str]:
    """Metric, evaluations to wait, and `min` or `max`, of METRIC:N or METRIC:N:max.

    Without the third part a metric with `accuracy` in its name is to grow, any other to shrink.
    """
    metric, _, rest = text.partition(":")
    patience, _, better = rest.partition(":")
    if not better:
        better = "max" if "accuracy" in metric else "min"
    if not metric or not patience.isdecimal() or int(patience) < 1 or better not in ("min", "max"):
        raise UsageError(f"--early-stop {text}: expected METRIC:N or METRIC:N:max, such as loss:3")
    return metric, int(patience), better


def check_resume(config: "Config") -> None:
    """UsageError for what could never be gone on from."""
    if config.allow_change is None:
        return
    if config.resume is None:
        raise UsageError(f"--allow-change {config.allow_change}: belongs to --resume")
    unknown = [name for name in allowed_changes(config) if name not in KEPT]
    if unknown:
        known = ", ".join(name.replace("_", "-") for name in KEPT)
        raise UsageError(f"--allow-change {unknown[0]}: expected of {known}; all others may change anyway")


def allowed_changes(config: "Config") -> list[str]:
    """Names of fields."""
    return [name.strip().replace("-", "_") for name in (config.allow_change or "").split(",") if name.strip()]
