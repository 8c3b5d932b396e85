"""Flags that were given and do nothing: each says so."""

from typing import TYPE_CHECKING

from hpctrain.plan.schedule import SCHEDULES

if TYPE_CHECKING:
    from hpctrain.config.settings import Config


def idle_flags(config: "Config", given: set[str], num_ranks: int) -> list[str]:
    """A line for each of `given`, names of fields, that has no effect beside the others on so many ranks."""
    reasons = {}
    if config.optimizer != "momentum":
        reasons["momentum"] = f"with --optimizer {config.optimizer}"
    if config.lr_schedule == "constant":
        reasons["lr_min"] = "with --lr-schedule constant"
    if config.stages == 1:
        flushes = SCHEDULES[config.schedule].flushes
        names = ("stage_split", "pipeline_warmup", "rank_order", *(("schedule",) if flushes else ()))
        reasons |= dict.fromkeys(names, "with one stage")
    if config.checkpoint_every is None:
        why = "without --checkpoint-every, but when a signal has asked the run to leave"
        reasons |= dict.fromkeys(("keep_checkpoints", "checkpoint_async"), why)
    if num_ranks == 1:
        reasons["stall_seconds"] = "with one process, which waits for no other"
    return [f"--{name.replace('_', '-')} has no effect {why}" for name, why in reasons.items() if name in given]
