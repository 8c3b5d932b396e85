"""What of a run may be another when it goes on, and what is told of it.

What nobody gives stays as it was saved; the rest is either told in a line, or refused by the name of its flag.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hpctrain.config import Config, UsageError, flag_name
from hpctrain.config.combinations import KEPT, allowed_changes
from hpctrain.plan.grid import Grid
from hpctrain.report.summary import counted
from hpctrain.train.errors import AgreedError
from hpctrain.train.resume import OF_A_START, Start, layout_of

IN_LAYOUT = ("stages", "servers")  # settings that the line on the layout tells
YET_TO_BE_CHOSEN = (("threads", None), ("device", "auto"))


def check_same_run(start: Start, config: Config) -> None:
    """UsageError where `config`, with absolute names, would be another run than the one that was saved."""
    for name in set(KEPT) - {"data", *allowed_changes(config)}:  # of data the digest tells
        saved, wanted = start.config[name], getattr(config, name)
        if saved != wanted:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag}: {start.checkpoint} was saved with {_shown(saved, wanted)}, and {_shown(wanted, saved)} is"
                f" asked for; leave {flag} out, or add --allow-change {name.replace('_', '-')}"
            )


def changes(start: Start, config: Config, grid: Grid) -> list[str]:
    """A line for each setting that is another one from here on."""
    saved, layout = start.config, layout_of(grid, config.servers)
    lines = []
    if layout != start.manifest["layout"]:
        both = (start.manifest["layout"], layout)
        before, now = (", ".join(counted(n, name.removesuffix("s")) for name, n in each.items() if n) for each in both)
        lines.append(f"--resume: saved by {before}; goes on with {now}")
    for each in dataclasses.fields(Config):
        before, now = saved[each.name], getattr(config, each.name)
        if each.name not in (*OF_A_START, *IN_LAYOUT) and before != now and (each.name, now) not in YET_TO_BE_CHOSEN:
            lines.append(f"--resume: {flag_name(each)} was {_shown(before, now)}, from here on {_shown(now, before)}")
    if start.folder is None and start.step >= config.steps:
        lines.append(f"--resume: it was saved at step {start.step}, so nothing is left to train; give more --steps")
    return lines


def _shown(value: Any, other: Any) -> str:
    """A setting in a line; of several options those that differ."""
    if isinstance(value, dict) and isinstance(other, dict):
        differing = sorted(name for name in value.keys() | other.keys() if value.get(name) != other.get(name))
        return ", ".join(f"{name}={value.get(name)}" for name in differing)
    return "none" if value is None else f"{value}"


def check_data(start: Start, data_sha256: str | None, data: str | None) -> None:
    """AgreedError where the run would go on with other data: by their digest, where there is one, else by name."""
    if "data" in start.allowed:
        return
    saved = start.manifest.get("data_sha256")
    if saved is None and data_sha256 is None and start.config["data"] != data:
        raise AgreedError(
            f"--data {data}: {start.checkpoint} was saved with {start.config['data']}; give that, or add"
            " --allow-change data"
        )
    if saved != data_sha256:
        raise AgreedError(
            f"--data: {start.checkpoint} was saved with data of sha256 {saved}, and this is {data_sha256};"
            " give the same, or add --allow-change data"
        )
