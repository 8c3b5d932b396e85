"""`hpctrain profile COSTS.json`: the seconds that each layer of a task takes on this machine, for --stage-split.

The flags are those of train. What counts of them is the task, its micro-batch, the precision and the threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.comm.abort import RankFailed
from hpctrain.config import Config, UsageError, parse
from hpctrain.report.summary import counted
from hpctrain.tasks.load import explained, short_name
from hpctrain.tools.alone import on_rank_0
from hpctrain.tools.new_file import check_new, write_new
from hpctrain.train.command import lengths, prepared_task
from hpctrain.train.errors import AgreedError
from hpctrain.train.facts import cpu_name
from hpctrain.train.layout import settled

if TYPE_CHECKING:
    from torch import nn

    from hpctrain.model.layer_times import LayerTime

SECONDS = 5.0  # that measuring takes, about, where FEWEST repeats are no more
FEWEST, MOST = 3, 100  # repeats, whose median counts


def run(argv: list[str], world) -> int:
    """Writes the file on rank 0. Returns 0, or 2 with one line for what cannot be. Collective."""
    return on_rank_0(world, lambda: _profile(argv, world is not None))


def _profile(argv: list[str], launched: bool) -> str | None:
    """What is wrong, if anything."""
    try:
        out, config = read_flags(argv)
        rows = rows_of(config)
        task, num_rows = _task_of(config)
    except ValueError as error:
        return str(error)
    rows, threads = min(rows, num_rows), threads_of(config)
    print(
        f"{short_name(config.task)}: micro-batches of {counted(rows, 'row')}, {counted(threads, 'thread')}", flush=True
    )
    try:
        times = measured(config, task, rows, threads)
    except (AgreedError, RankFailed) as error:
        return str(error)
    about = {"task": config.task, "rows": rows, "threads": threads, "cpu": cpu_name()}
    fault = write_new(out, {**about, "layers": [time._asdict() for time in times]})
    if fault is None:
        _print_table(times, launched)
        print(f"to share the layers out by these seconds: --stage-split {out}", flush=True)
    return fault


def read_flags(argv: list[str]) -> tuple[Path, Config]:
    """The new file, and the configuration that the other words ask for. UsageError for what cannot be."""
    if not argv or argv[0].startswith("-"):
        raise UsageError("profile: name the file to write first, as in: profile COSTS.json --task text --stages 4")
    out = Path(argv[0])
    check_new(out)
    return out, parse(argv[1:])[0]


def rows_of(config: Config) -> int:
    """Rows of a micro-batch where each stage has one rank. UsageError for a layout that cannot be."""
    pieces = settled(config, config.stages).num_microbatches
    return config.micro_batch_size or -(-config.global_batch_size // pieces)


def threads_of(config: Config) -> int:
    """As a rank of a launch would have them; one where nobody says how many."""
    wished = os.environ.get("OMP_NUM_THREADS", "")
    return config.threads or (int(wished) if wished.isdecimal() else 0) or 1


def _task_of(config: Config) -> tuple[Any, int]:
    """The task, its data ready, and the number of rows to train on. UsageError where it cannot be measured."""
    try:
        task = prepared_task(config)
        num_rows, _ = lengths(task)
    except ValueError as error:
        raise UsageError(explained(config.task, error)) from None
    if not hasattr(task, "layers"):
        raise UsageError(f"--task {config.task}: has a module(), which is one piece; only layers() can be shared out")
    return task, num_rows


def measured(config: Config, task: Any, rows: int, threads: int) -> list[LayerTime]:
    """Of each layer. AgreedError or RankFailed, one line, for what the task gives instead of layers or rows."""
    import torch

    from hpctrain.model.layer_times import measure
    from hpctrain.model.precision import Precision
    from hpctrain.train.checked import checked_factories, checked_loss
    from hpctrain.train.loader import Reader, Request, read

    torch.set_num_threads(threads)
    precision, data = Precision(config.precision), task.dataset("train")
    factories = checked_factories(task.layers(), "layers()")
    factories = [partial(_built, factory, index) for index, factory in enumerate(factories)]
    inputs, targets = next(read(Reader(lambda: data, precision.dtype, config.seed), [Request(tuple(range(rows)))]))

    def loss(outputs: Any, answers: Any) -> Any:
        return checked_loss(task.loss(outputs, answers))

    once = partial(measure, factories, inputs, loss, targets, config.seed, precision)
    return once(repeats_within(once(1)))


def _built(factory: Callable[[], nn.Module], index: int) -> nn.Module:
    from hpctrain.train.checked import checked_layer

    return checked_layer(factory(), f"layers.{index}")


def repeats_within(times: Sequence[LayerTime]) -> int:
    """So many that all of them take SECONDS, by the times of one."""
    whole = sum(sum(time) for time in times)
    return max(FEWEST, min(MOST, int(SECONDS / whole))) if whole else MOST


def _print_table(times: Sequence[LayerTime], launched: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    plain = {"force_terminal": False} if launched else {}
    whole = sum(sum(time) for time in times) or 1.0
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "forward ms", "backward ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer, time in enumerate(times):
        table.add_row(f"{layer}", *(f"{1000 * part:.3f}" for part in time), f"{100 * sum(time) / whole:.1f} %")
    Console(file=sys.stdout, markup=False, highlight=False, emoji=False, **plain).print(table)
