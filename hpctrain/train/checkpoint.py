"""Saving a run and going on from what was saved: all ranks together, one folder for each checkpoint.

Every rank writes one file, all at the same time, from a copy; rank 0 adds the manifest and gives the folder its name
when all files are on disk. Who loads reads a checkpoint that all ranks agree on, after every byte of it was looked at.
"""

import math
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.plan.program import ALL, NOTHING
from hpctrain.train import background
from hpctrain.train import checkpoint_files as files
from hpctrain.train.checkpoint_files import CheckpointError, File
from hpctrain.train.checkpoint_pieces import Tensors, described, opened, stored
from hpctrain.train.checkpoint_state import State
from hpctrain.train.errors import AgreedError, on_all, on_first
from hpctrain.train.executor import Executor
from hpctrain.train.resume import check_whole, layout_of
from hpctrain.train.served_state import ask_servers
from hpctrain.train.train_state import TrainState, read_state


class Checkpoints:
    """Of a run, below `root`; the newest ones stay, as many as --keep-checkpoints says.

    Every method is collective over the ranks of `mesh`.
    """

    def __init__(self, root: Path, config: Config, executor: Executor, mesh: Mesh, data_sha256: str | None = None):
        self.root, self.config, self.executor, self.mesh = root, config, executor, mesh
        self.data_sha256, self.state = data_sha256, State(executor)
        self.nbytes = 0  # of the last one that was saved
        self.seconds: list[float] = []  # for which saving kept this rank from training
        self.num_failed = 0
        self._background, self._given_up = background.Background(), threading.Event()
        self._begun: int | None = None  # the step that is being written

    def check_room(self) -> None:
        """AgreedError where the checkpoints that are kept, and one more while it is written, will not fit."""
        own = sum(self.mesh.world.all_gather_json(self.state.nbytes()))
        nbytes = own + sum(each["bytes"] for each in self._ask("measure"))
        on_first(self.mesh.world, lambda: self._find_room(nbytes))

    def save(self, progress: TrainState) -> Path:
        """Returns the folder, whole on disk. AgreedError where it cannot be written; those before it stay."""
        self.finish()
        began = time.perf_counter()
        self.mesh.progress.begin("saving a checkpoint", is_patient=True)
        self._begin(progress)
        self._wait()
        self._note_saved(began)
        return self.root / files.name_of(progress.step)

    def save_or_tell(self, progress: TrainState) -> None:
        """As `save`; where it fails, a line says so and the run goes on. With --checkpoint-async it only begins."""
        if not self.config.checkpoint_async:
            self._or_tell(lambda: self.save(progress), progress.step)
            return
        self.finish()
        began = time.perf_counter()
        self._or_tell(lambda: self._begin(progress), progress.step)
        self._note_saved(began)

    def finish(self) -> None:
        """What is written in the background is whole when this returns, or a line says why not."""
        if self._begun is not None:
            self.mesh.progress.begin("finishing a checkpoint", is_patient=True)
            self._or_tell(self._wait, self._begun)
            self.mesh.progress.begin("what follows a checkpoint")

    def has(self, step: int) -> bool:
        """Whether one of that step was saved. Collective."""
        return on_first(self.mesh.world, lambda: (self.root / files.name_of(step)).exists())

    def give_up(self) -> None:
        """This rank writes no more of what was begun, which will not be whole."""
        self._given_up.set()
        self._background.wait()
        self._begun = None

    def _or_tell(self, call: Callable[[], object], step: int) -> None:
        try:
            call()
        except AgreedError as error:
            self.num_failed += 1
            if self.mesh.rank == 0:
                print(f"note: no checkpoint of step {step}: {error}; the run goes on", file=sys.stderr)

    def _note_saved(self, began: float) -> None:
        self.seconds.append(time.perf_counter() - began)
        self.mesh.progress.begin("what follows a checkpoint")

    def _begin(self, progress: TrainState) -> None:
        """Copies what is to be saved; threads of all ranks write it from here on."""
        part = Path(on_first(self.mesh.world, lambda: str(files.begin(self.root, progress.step))))
        pieces = list(self.state.pieces())
        tensors, manifest = stored(pieces), self._manifest(progress)
        note = {"contents": described(pieces), "items_seen": self.executor.update.items_seen}
        self._ask("save", folder=str(part))

        def work() -> None:
            background.write_noted(part, f"rank-{self.mesh.rank:04d}", tensors, note)
            if self.mesh.rank == 0:
                self._seal(part, manifest)

        self._begun, self._part = progress.step, part
        self._given_up.clear()
        self._background.start(work)

    def _wait(self) -> None:
        """AgreedError where what was begun cannot be written."""
        self._begun = None
        own = self._background.wait() if self.mesh.rank else []
        told = self.mesh.world.gather_json(own)

        def whole() -> None:
            faults = [f"rank {rank}: {fault}" for rank, lines in enumerate(told or []) for fault in lines]
            try:
                self._ask_servers("wait")
            except CheckpointError as error:
                faults.append(str(error))
            if faults:
                self._given_up.set()
            faults += self._background.wait()
            if faults:
                shutil.rmtree(self._part, ignore_errors=True)  # the room is needed
                raise CheckpointError(faults[0])

        on_first(self.mesh.world, whole)

    def figures(self) -> dict[str, Any]:
        """For the summary: `seconds` is the median for which saving kept the ranks from training."""
        seconds = statistics.median(self.seconds) if self.seconds else None
        return {"saved": len(self.seconds), "failed": self.num_failed, "bytes": self.nbytes or None, "seconds": seconds}

    def count_on_from(self, other: "Checkpoints") -> None:
        """Figures go on behind those of another launch of this run."""
        self.nbytes, self.seconds, self.num_failed = other.nbytes, other.seconds, other.num_failed

    def load(self, folder: Path, manifest: Mapping[str, Any] | None = None) -> TrainState:
        """Takes over what the folder holds. AgreedError, and nothing has changed, where it is not whole, or not of
        this model. `manifest`: of a folder that was found whole just now.
        """
        manifest = check_whole(folder, self.mesh.world) if manifest is None else manifest
        anew = _optimizers_that_differ(manifest["config"], asdict(self.config))
        state = on_all(self.mesh.world, lambda: read_state(folder, manifest))
        tensors = on_all(self.mesh.world, lambda: opened(folder, anew, manifest))
        self._check_names(folder, tensors)
        take = on_all(self.mesh.world, lambda: _naming(folder, lambda: self.state.prepare(tensors, "tables" in anew)))
        self._ask("load", folder=str(folder), clock=state.step, anew=anew)
        take()
        if anew and self.mesh.rank == 0:
            print(f"note: --resume: what the optimizer keeps begins anew: {', '.join(anew)}", file=sys.stderr)
        self.executor.update.begin_at(state.step)
        seen = manifest["items_seen"]
        self.executor.update.items_seen = seen[self.mesh.replica] if len(seen) == self.mesh.data.size else 0.0
        return state

    def _ask(self, do: str, **what) -> list[dict[str, Any]]:
        """What the servers answer, where there are any. AgreedError where one of them cannot. Collective."""
        return on_first(self.mesh.world, lambda: self._ask_servers(do, **what))

    def _ask_servers(self, do: str, **what) -> list[dict[str, Any]]:
        """Of rank 0."""
        update = self.executor.update
        if update.served == NOTHING:
            return []
        dense = update.gradients if update.served == ALL else None
        shapes = {name: list(each.shape) for name, each in dense.parameters.items()} if dense else {}
        places = {name: [dense.places[name].start, shape] for name, shape in shapes.items()} if dense else {}
        return ask_servers(update.client, {"do": do, "places": places, **what})

    def _find_room(self, nbytes: int) -> None:
        number, free = self.config.keep_checkpoints + 1, shutil.disk_usage(_existing(self.root)).free
        free += sum(file.stat().st_size for file in self.root.glob("step-*/*"))  # which make room
        if free < nbytes * number:
            raise CheckpointError(
                f"{self.root}: a checkpoint takes {nbytes / 1e6:.1f} MB, {number} of them are there at a time, and "
                f"{free / 1e6:.1f} MB are free; lower --keep-checkpoints, or name another --run-dir"
            )

    def _manifest(self, progress: TrainState) -> dict[str, Any]:
        """But for what the ranks note of their files."""
        return {
            "hpctrain": __version__,
            "step": progress.step,
            "state": progress.told(),
            "layout": layout_of(self.mesh.grid, self.config.servers),
            "config": {name: _in_json(value) for name, value in asdict(self.config).items()},
            "data_sha256": self.data_sha256,
        }

    def _seal(self, part: Path, manifest: dict[str, Any]) -> None:
        """Waits for the files of all ranks and servers."""
        grid = self.mesh.grid
        names = [f"rank-{rank:04d}" for rank in range(self.mesh.size)]
        names += [f"server-{server:04d}" for server in range(self.config.servers)]
        notes = background.notes_of(part, names, self._given_up)
        manifest["items_seen"] = [notes[grid.rank(0, replica)]["items_seen"] for replica in range(grid.num_replicas)]
        manifest["contents"] = [note["contents"] for note in notes]
        whole = files.seal(part, manifest, [File(*note["file"]) for note in notes])
        self.nbytes = sum(note["file"][1] for note in notes)
        try:
            files.prune(self.root, self.config.keep_checkpoints, whole)  # first of all: a full disk has room again
            files.note_latest(self.root, whole.name)
        except OSError as error:
            print(f"note: {whole} is saved; {error.filename}: {error.strerror}", file=sys.stderr)

    def _check_names(self, folder: Path, tensors: Tensors) -> None:
        """AgreedError where the checkpoint has weights that no rank has."""
        own = {name for part in self.mesh.world.all_gather_json(sorted(self.state.names())) for name in part}
        strange = sorted(key for key in tensors if key.startswith("weights/") and key not in own)
        if strange:
            raise AgreedError(
                f"{folder}: {strange[0][:80]} is not in this model; is it of another task or other options?"
            )


def _optimizers_that_differ(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Of the dense part, of tables: as `opened` leaves them out."""
    dense = saved.get("optimizer") != now["optimizer"]
    before, after = (each.get("table_optimizer") or each.get("optimizer") for each in (saved, now))
    return ["dense"] * dense + ["tables"] * (before != after)


def _in_json(value: Any) -> Any:
    """JSON has no infinity."""
    return "inf" if value == math.inf else value


def _naming(folder: Path, call: Callable[[], Any]) -> Any:
    """What `call` gives; a ValueError, also of a checkpoint or a table, tells the folder."""
    try:
        return call()
    except ValueError as error:
        said = str(error)
        raise CheckpointError(said if str(folder) in said else f"{folder}: {said}") from None


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return folder if folder.exists() else _existing(folder.absolute().parent)
