"""`hpctrain tune --out FILE`: what an all-reduce and a training step take on exactly these ranks, for `--tuning FILE`.

The flags of train, with --task among them, say whose steps are measured with several sizes of buckets; what counts of
them is what counts for the time of a step.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.config import Config, Parser, UsageError, parse
from hpctrain.config import parser as train_parser
from hpctrain.plan.allreduce import LARGEST_MESSAGE, Constants
from hpctrain.plan.fit import best_bucket
from hpctrain.plan.tuning import FORMAT, Tuning
from hpctrain.report.summary import counted

FACTOR = 4  # from one size to the next
MEASURED = ("bucket_bytes", "tuning")  # of the settings


def parser() -> Parser:
    top = Parser("hpctrain tune", add_help=False, allow_abbrev=False)
    top.add_argument("--out", metavar="FILE", help="the new file; - for standard output")
    top.add_argument("--min-bytes", default="4096", metavar="BYTES", help="smallest array (4096)")
    top.add_argument("--max-bytes", default="67108864", metavar="BYTES", help="largest array, by factors of 4 (64 MiB)")
    top.add_argument("--repeats", default="7", metavar="N", help="rounds, whose median counts (7)")
    top.add_argument("--task", metavar="NAME", help="measure sizes of buckets too, by steps of this task")
    top.epilog = "with --task also the flags of train, such as --global-batch-size"
    return top


def run(argv: list[str], world) -> int:
    """Writes the file on rank 0. Returns 0, or 2 with one line for what cannot be. Collective."""
    from hpctrain.comm.mesh import Mesh
    from hpctrain.train.command import prepare_nodes, with_threads

    with Mesh(world) as mesh:
        asked = mesh.world.broadcast_json(_asked(argv, mesh.size) if mesh.rank == 0 else None)
        fault = asked.get("usage")
        config = Config(**asked["config"]) if asked.get("config") else None
        if config is not None:
            fault = fault or prepare_nodes(asked["config"], mesh)
            config = with_threads(config, mesh)
        told = fault if fault else _measured(asked, config, mesh, world)
        fault = mesh.world.broadcast_json(_finish(asked, told) if mesh.rank == 0 else None)
    if fault and mesh.rank == 0:
        print(f"hpctrain: {fault}", file=sys.stderr)
    return 2 if fault else 0


def _asked(argv: list[str], num_ranks: int) -> dict[str, Any]:
    """On rank 0: what to measure, or under `usage` what is wrong with what was asked for."""
    from hpctrain.tools.new_file import check_new

    try:
        flags, rest = parser().parse_known_args(argv)
        if num_ranks < 2:
            raise UsageError(
                "tune: one rank sums nothing up; start two at least: mpirun -n 2 python -m hpctrain tune --out FILE"
            )
        if not flags.out:
            raise UsageError("tune: name the file to write, as in: tune --out tuning.json")
        if flags.out != "-":
            check_new(Path(flags.out))
        asked = {"out": flags.out, "sizes": sizes_of(flags), "repeats": _number("--repeats", flags.repeats, 1)}
        if flags.task is None and rest:
            raise UsageError(f"{rest[0]}: tune has no such flag; with --task NAME it takes those of train")
        return asked | {"config": asdict(_config(["--task", flags.task, *rest], num_ranks)) if flags.task else None}
    except ValueError as error:
        return {"usage": str(error)}


def sizes_of(flags: Any) -> list[int]:
    """Bytes of the arrays. UsageError for bounds that cannot be."""
    low, high = (_number(f"--{end}-bytes", getattr(flags, f"{end}_bytes"), 4) for end in ("min", "max"))
    if low % 4:
        raise UsageError(f"--min-bytes {low}: expected a multiple of 4, the bytes of a float32")
    if high < low:
        raise UsageError(f"--max-bytes {high}: should be at least --min-bytes {low}")
    if high > LARGEST_MESSAGE:
        raise UsageError(f"--max-bytes {high}: at most {LARGEST_MESSAGE}, the largest message")
    sizes = [low]
    while sizes[-1] * FACTOR <= high:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def _number(name: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= least):
        raise UsageError(f"{name}: expected a whole number >= {least}, got {text!r}")
    return int(text)


def _config(argv: list[str], num_ranks: int) -> Config:
    """Of the steps to measure, its task ready for this node. ValueError, one line, for what cannot be measured."""
    from hpctrain.tasks.load import absolute_name, explained
    from hpctrain.train.command import lengths, prepared_task
    from hpctrain.train.layout import grid_of, settled

    flags = train_parser().parse(argv)
    for name in MEASURED:
        if name in flags:
            raise UsageError(f"--{name.replace('_', '-')}: is what is measured here; leave it out")
    config, _ = parse(argv)
    if config.servers:
        raise UsageError("--servers: gradients go to the servers; leave it out")
    # what a --config says of what is measured was of a run before
    config = replace(config, tuning=None, bucket_bytes=Config.bucket_bytes, loader_workers=0)
    config = settled(config, num_ranks)
    if grid_of(config, num_ranks).num_replicas < 2:
        raise UsageError(f"--stages {config.stages}: on {num_ranks} ranks nothing is summed up; leave two replicas")
    try:
        lengths(prepared_task(config))
    except ValueError as error:
        raise UsageError(explained(config.task, error)) from None
    return replace(
        config, task=absolute_name(config.task), data=config.data and str(Path(config.data).absolute()), run_dir=None
    )


def _measured(asked: dict[str, Any], config: Config | None, mesh, world) -> dict[str, Any] | str:
    """What the file is to hold; or what is wrong, in one line. Collective."""
    from hpctrain.comm.mesh import Mesh
    from hpctrain.comm.tuning import place_of
    from hpctrain.tools.tune_buckets import measured_steps
    from hpctrain.tools.tune_sums import constants_from, measured_sums
    from hpctrain.tools.tune_table import lines_of, step_lines
    from hpctrain.train.errors import AgreedError
    from hpctrain.train.layout import grid_of

    tell = partial(_tell, mesh.rank, asked["out"])
    with Mesh(world, grid_of(config or Config(), mesh.size)) as measuring:
        place, ring = place_of(measuring.data.ring), measuring.data.ring
        sizes, rounds = asked["sizes"], counted(asked["repeats"], "round")
        tell([f"{place}: {counted(len(sizes), 'size')}, {rounds}"])
        table = measured_sums(measuring, sizes, asked["repeats"])
        constants = constants_from(table, measuring)
        tell(lines_of(table, constants, ring))
    values = file_of(place, constants, table)
    if config is None:
        return values
    try:
        steps = measured_steps(config, world, Tuning(constants), asked["repeats"])
    except AgreedError as error:
        return str(error)
    tell(step_lines(steps))
    values["task"] = config.task
    values["steps"] = [{"bucket_bytes": size, "seconds": seconds} for size, seconds in steps.items()]
    return values | ({"bucket_bytes": best_bucket(steps)} if len(steps) > 1 else {})


def _tell(rank: int, out: str, lines: list[str]) -> None:
    """On rank 0, beside the file where that goes to standard output. Who reads no further stops nothing."""
    from hpctrain.tools.alone import unless_unread

    if rank == 0:
        unless_unread(lambda: print(*lines, sep="\n", file=sys.stderr if out == "-" else sys.stdout, flush=True))


def file_of(place: Any, constants: Constants, table: dict[str, dict[int, float]]) -> dict[str, Any]:
    """The file's content, without a size of buckets."""
    sizes = list(next(iter(table.values())))
    return {
        "format": FORMAT,
        "hpctrain": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **asdict(place),
        **asdict(constants),
        "times": [{"bytes": size, **{name: times[size] for name, times in table.items()}} for size in sizes],
    }


def _finish(asked: dict[str, Any], told: dict[str, Any] | str) -> str | None:
    """On rank 0: writes the file. What is wrong, if anything."""
    from hpctrain.tools.alone import unless_unread
    from hpctrain.tools.new_file import write_new

    if isinstance(told, str):
        return told
    if asked["out"] == "-":
        return unless_unread(lambda: print(json.dumps(told, indent=2)))
    fault = write_new(Path(asked["out"]), told)
    if fault is None:
        _tell(0, asked["out"], [f"to train by these: --tuning {asked['out']}"])
    return fault
