"""Saving a run and going on from what was saved: all ranks together, one folder for each checkpoint.

Every rank writes one file, all at the same time; rank 0 adds the manifest and gives the folder its name when all files
are on disk. Who loads reads a checkpoint that all ranks agree on, after every byte of it was looked at.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.train import checkpoint_files as files
from hpctrain.train.checkpoint_files import CheckpointError, File
from hpctrain.train.checkpoint_pieces import Tensors, described, index, stored
from hpctrain.train.checkpoint_state import State
from hpctrain.train.errors import AgreedError
from hpctrain.train.executor import Executor
from hpctrain.train.trainer import TrainState

FORGOTTEN = ("step_seconds",)  # of TrainState: times of steps that other ranks may have made


class Checkpoints:
    """Of a run, below `root`; the newest `keep` stay. Every method is collective over the ranks of `mesh`."""

    def __init__(self, root: Path, config: Config, executor: Executor, mesh: Mesh, keep: int = 2):
        self.root, self.config, self.executor, self.mesh, self.keep = root, config, executor, mesh, keep
        self.state = State(executor)

    def check_room(self) -> None:
        """AgreedError where the checkpoints that are kept, and one more while it is written, will not fit."""
        nbytes = sum(self.mesh.world.all_gather_json(sum(each.values.nbytes for each in self.state.pieces())))
        self._by_rank_0(lambda: self._find_room(nbytes))

    def save(self, progress: TrainState) -> Path:
        """Returns the folder, whole on disk. AgreedError where it cannot be written; those before it stay."""
        step = progress.step
        part = Path(self._by_rank_0(lambda: str(files.begin(self.root, step))))
        pieces = list(self.state.pieces())
        written = self._all(lambda: self._write(part, pieces))
        own = self.executor.update.items_seen
        parts = self.mesh.world.gather_json([written, described(pieces), own])
        return Path(self._by_rank_0(lambda: str(self._seal(part, progress, parts))))

    def load(self, folder: Path) -> TrainState:
        """Takes over what the folder holds. AgreedError, and nothing has changed, where it is not whole, or not of
        this model.
        """
        manifest = self._by_rank_0(lambda: files.read_manifest(folder))
        listed = files.files_of(folder, manifest)  # the same on all ranks, so are its errors
        self._all(lambda: [files.check_file(folder, each) for each in listed[self.mesh.rank :: self.mesh.size]])
        state, tensors = self._all(lambda: _opened(folder, manifest, listed))
        self._check_names(folder, tensors)
        take = self._all(lambda: self.state.prepare(tensors))
        take()
        seen = manifest["items_seen"]
        self.executor.update.items_seen = seen[self.mesh.replica] if len(seen) == self.mesh.data.size else 0.0
        return state

    def _find_room(self, nbytes: int) -> None:
        number, free = self.keep + 1, shutil.disk_usage(_existing(self.root)).free
        if free < nbytes * number:
            raise CheckpointError(
                f"{self.root}: a checkpoint takes {nbytes / 1e6:.1f} MB, {number} of them are there at a time, and "
                f"{free / 1e6:.1f} MB are free; lower --keep-checkpoints, or name another --run-dir"
            )

    def _write(self, part: Path, pieces: list) -> list:
        each = files.write_tensors(part, f"rank-{self.mesh.rank:04d}.safetensors", stored(pieces))
        return [each.name, each.nbytes, each.sha256]

    def _seal(self, part: Path, progress: TrainState, parts: list) -> Path:
        grid = self.mesh.grid
        manifest = {
            "hpctrain": __version__,
            "step": progress.step,
            "state": {key: value for key, value in asdict(progress).items() if key not in FORGOTTEN},
            "layout": {"stages": grid.num_stages, "replicas": grid.num_replicas},
            "config": asdict(self.config),
            "items_seen": [parts[grid.rank(0, replica)][2] for replica in range(grid.num_replicas)],
            "contents": [contents for _, contents, _ in parts],
        }
        whole = files.seal(part, manifest, [File(*written) for written, _, _ in parts])
        files.prune(self.root, self.keep)
        return whole

    def _check_names(self, folder: Path, tensors: Tensors) -> None:
        """AgreedError where the checkpoint has weights that no rank has."""
        own = {name for part in self.mesh.world.all_gather_json(sorted(self.state.names())) for name in part}
        strange = sorted(key for key in tensors if key.startswith("weights/") and key not in own)
        if strange:
            raise AgreedError(f"{folder}: {strange[0]} is not in this model; is it of another task or other options?")

    def _by_rank_0(self, call: Callable[[], Any]) -> Any:
        """What `call` gives on rank 0, as JSON has it, on all ranks; AgreedError where it fails."""
        value, fault = _outcome(call) if self.mesh.rank == 0 else (None, None)
        value, fault = self.mesh.world.broadcast_json([value, fault])
        if fault is not None:
            raise AgreedError(fault)
        return value

    def _all(self, call: Callable[[], Any]) -> Any:
        """What `call` gives on this rank; AgreedError on all where it fails on any."""
        value, fault = _outcome(call)
        for rank, told in enumerate(self.mesh.world.all_gather_json(fault)):
            if told is not None:
                raise AgreedError(f"rank {rank}: {told}")
        return value


def _outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return call(), None
    except OSError as error:
        return None, f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
    except ValueError as error:  # also a CheckpointError, a TableError
        return None, str(error)


def _opened(folder: Path, manifest: dict[str, Any], listed: list[File]) -> tuple[TrainState, Tensors]:
    """CheckpointError where the manifest does not say what it should."""
    known = {each.name for each in fields(TrainState)} - set(FORGOTTEN)
    state = manifest.get("state")
    if not isinstance(state, dict) or state.keys() != known or type(state["step"]) is not int:
        raise CheckpointError(f"{folder / files.MANIFEST}: damaged, state: {', '.join(sorted(known))} are expected")
    return TrainState(**state), Tensors(folder, index(folder, listed, manifest.get("contents")))


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return folder if folder.exists() else _existing(folder.absolute().parent)
