"""Which checkpoint a run goes on from: found, and looked at byte by byte, before anything is built.

`--resume auto` is for a command that is given again and again, as that of a job which is requeued: it goes on in the
folder of its run. `--resume PATH` begins a new run, in a folder of its own, from what another one saved.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from hpctrain.comm.group import Group
from hpctrain.config import Config, UsageError, parse
from hpctrain.config.servers import WITH_SERVERS
from hpctrain.plan.grid import Grid
from hpctrain.tasks.load import BUILT_IN, absolute_name, short_name
from hpctrain.train import checkpoint_files as files
from hpctrain.train.errors import AgreedError, on_all, on_first
from hpctrain.train.layout import grid_of

if TYPE_CHECKING:
    from hpctrain.train.survival import Survival
CHECKPOINTS, CONFIG = "checkpoints", "config.toml"  # in the folder of a run
OF_A_START = ("run_dir", "resume", "allow_change", "epochs")  # settings that say nothing of the run itself
# settings that are chosen for a layout, or a schedule, where nobody gives them
BY_LAYOUT = ("num_microbatches", "threads", "stage_split", "rank_order")
BY_MACHINE = ("device",)  # where nobody gives them
BY_SCHEDULE = ("num_microbatches", "chunks", "pipeline_warmup", "vertical_sync")


@dataclass(frozen=True)
class Start:
    """How a run begins: in `folder`, one that is there (None: a new one), from `checkpoint` (None: from nothing).

    `allowed`: what of it may be other than it was saved. `survival`: where lost ranks are no end.
    """

    folder: Path | None = None
    checkpoint: Path | None = None
    manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    survival: Survival | None = None

    @property
    def step(self) -> int:
        return self.manifest.get("step", 0)

    @property
    def rows(self) -> int:
        """That were trained on."""
        return self.manifest["state"]["rows"] if self.manifest else 0

    @property
    def config(self) -> dict[str, Any]:
        """The settings that were saved, by name; those of this version."""
        saved = self.manifest["config"]
        known = {each.name: saved.get(each.name) for each in dataclasses.fields(Config)}
        return {name: math.inf if value == "inf" else value for name, value in known.items()}


ANEW = Start()


def find(argv: list[str], group: Group) -> Start:
    """What `--resume` asks for. AgreedError where there is no whole checkpoint, or none at all. Collective."""
    listed = on_first(group, lambda: _candidates(argv))
    folder = listed["folder"] and Path(listed["folder"])
    faults = []
    for name in listed["checkpoints"]:
        try:
            manifest = check_whole(Path(name), group)
        except AgreedError as error:
            faults.append(str(error))
            continue
        if group.rank == 0:
            for fault in faults:
                print(f"note: --resume: {fault}; the one before it is taken", file=sys.stderr)
        return Start(folder, Path(name), manifest)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise AgreedError(f"--resume: no whole checkpoint: {faults[0]}{more}; begin anew in another --run-dir")
    return Start(folder)


def check_whole(checkpoint: Path, group: Group) -> dict[str, Any]:
    """Its manifest. AgreedError where a byte of it is not what was written. The ranks share the reading. Collective."""
    manifest = on_first(group, lambda: _manifest(checkpoint))
    own = files.files_of(checkpoint, manifest)[group.rank :: group.size]
    on_all(group, lambda: [files.check_file(checkpoint, each) for each in own])
    return manifest


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """CheckpointError where it lists no files, or settings and a layout that no run has."""
    manifest = files.read_manifest(checkpoint)
    files.files_of(checkpoint, manifest)
    saved, layout = Start(manifest=manifest).config, manifest["layout"]
    told = [each for each in dataclasses.fields(Config) if each.name in manifest["config"]]
    wrong = [each.name for each in told if not fits(each.type, saved[each.name])]
    if layout.keys() != {"stages", "replicas", "servers"} or not all(fits(int, each) for each in layout.values()):
        wrong.append("layout")
    if wrong:
        raise files.CheckpointError(f"{checkpoint / files.MANIFEST}: damaged, {wrong[0]} is not what a run has")
    return manifest


def fits(kind: Any, value: Any) -> bool:
    """Whether JSON that was read may be a field of that type; a whole number may be one with a point."""
    kinds = [get_origin(each) or each for each in (get_args(kind) if isinstance(kind, UnionType) else (kind,))]
    return type(value) in kinds or type(value) is int and float in kinds


def parse_resumed(argv: list[str], start: Start, num_ranks: int) -> tuple[Config, set[str]]:
    """As `parse`, where what nobody gives stays as it was saved. What was chosen for another layout, or schedule, or
    task, is chosen again. UsageError.
    """
    saved = {name: value for name, value in start.config.items() if name not in OF_A_START and value is not None}
    wanted, _ = parse(argv)
    if start.folder is None:
        _check_code(start, saved, wanted)
    other = ("stages", "shard_optimizer") if wanted.servers else ("servers",) if wanted.stages > 1 else ()
    unfit = {*BY_LAYOUT, *BY_MACHINE, *BY_SCHEDULE, *WITH_SERVERS, *other, "task_option", "data"}
    config, _ = parse(argv, {name: value for name, value in saved.items() if name not in unfit})
    unfit = {*BY_MACHINE, *other, *(() if config.servers else WITH_SERVERS)}
    if start.manifest["layout"] != layout_of(grid_of(config, num_ranks), config.servers):
        unfit |= set(BY_LAYOUT)
    if config.schedule != saved.get("schedule"):
        unfit |= set(BY_SCHEDULE)
    if absolute_name(config.task) != saved.get("task"):
        unfit |= {"task_option", "data"}
    return parse(argv, {name: value for name, value in saved.items() if name not in unfit})


def _check_code(start: Start, saved: Mapping[str, Any], wanted: Config) -> None:
    """UsageError where the checkpoint, which may be anybody's, names code that the command line does not."""
    for name, is_code in (("task", saved.get("task") not in BUILT_IN), ("aggregate", ".py:" in saved["aggregate"])):
        if is_code and absolute_name(getattr(wanted, name)) != saved[name]:
            raise UsageError(
                f"--resume {start.checkpoint}: was saved with --{name} {saved[name]}, whose code runs only where"
                " that is given here too"
            )


def layout_of(grid: Grid, num_servers: int) -> dict[str, int]:
    """As a manifest has it."""
    return {"stages": grid.num_stages, "replicas": grid.num_replicas, "servers": num_servers}


def _candidates(argv: list[str]) -> dict[str, Any]:
    """The run's folder, where it is to be one that is there, and checkpoints, the best first. UsageError."""
    config, _ = parse(argv)
    if config.resume is None:
        return {"folder": None, "checkpoints": []}
    if config.resume == "auto":
        return _of_run(config)
    path = Path(config.resume).absolute()
    if not path.exists():
        beside = ", ".join(each.name for each in files.newest_first(path.parent))
        hint = f"there is {beside}" if beside else "give auto, or a folder as step-000040"
        raise UsageError(f"--resume {config.resume}: no such folder; {hint}")
    if (path / files.MANIFEST).exists() or files.NAME.fullmatch(path.name):
        found = [path]
    else:
        found = files.newest_first(path / CHECKPOINTS) or files.newest_first(path)
    if not found:
        raise UsageError(f"--resume {config.resume}: no checkpoint is there; give auto, or a folder as step-000040")
    return {"folder": None, "checkpoints": list(map(str, found))}


def _of_run(config: Config) -> dict[str, Any]:
    name = default_folder(config)
    if name is None:
        raise UsageError("--resume auto: needs --run-dir, the folder of the run (in a Slurm job it is that of the job)")
    folder = Path(name).absolute()
    found = files.newest_first(folder / CHECKPOINTS)
    if not found:
        if folder.exists():
            _check_may_begin(folder)
        print(f"note: --resume auto: no checkpoint in {name}, so the run begins", file=sys.stderr)
    return {"folder": str(folder) if folder.exists() else None, "checkpoints": list(map(str, found))}


def _check_may_begin(folder: Path) -> None:
    """UsageError where a run that begins here would destroy something."""
    try:
        there = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise UsageError(f"--resume auto: {folder}: {error.strerror}") from None
    if "summary.json" in there:
        raise UsageError(f"--resume auto: {folder} is of a run that is done and saved no checkpoint; name another")
    if there and CONFIG not in there:
        raise UsageError(f"--resume auto: {folder} is there, and not the folder of a run; name another")


def folder_to_go_on_in(argv: list[str]) -> Path | None:
    """That of a run which `--resume auto` names, None where there is none yet. UsageError."""
    config, _ = parse(argv)
    name = default_folder(config) if config.resume == "auto" else None
    return Path(name).absolute() if name is not None and Path(name, CONFIG).exists() else None


def default_folder(config: Config) -> str | None:
    """The folder that the same command finds again: `--run-dir`, or that of the job; None where there is neither."""
    job = os.environ.get("SLURM_JOB_ID")
    return config.run_dir or (f"runs/{short_name(config.task)}-{job}" if job else None)
