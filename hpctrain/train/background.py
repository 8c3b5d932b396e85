"""Checkpoints that are written while training goes on: what is saved is copied, a thread of each rank writes the copy.

The threads speak through the folder, not through MPI: each notes what it has written as `rank-0003.json`, and that of
rank 0 seals the checkpoint when all notes are there. So it is whole as soon as the slowest rank has written its part.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hpctrain.report.summary import write_json
from hpctrain.train import checkpoint_files as files
from hpctrain.train.errors import outcome

POLL_SECONDS = 0.02


class Background:
    """The thread of this rank that writes, one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.faults: list[str] = []  # of what this thread wrote last, and of what it waited for to seal

    def wait(self) -> list[str]:
        """Returns when nothing is being written any more: what went wrong, in lines, if anything."""
        if self._thread is not None:
            self._thread.join()
        self._thread, faults = None, self.faults
        self.faults = []
        return faults

    def start(self, work: Callable[[], None]) -> None:
        """Has `work` done, after what was started before. An OSError or ValueError in it becomes a fault."""
        assert self._thread is None, "wait first"
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        _, fault = outcome(work)
        if fault is not None:
            self.faults.append(fault)


def write_noted(part: Path, name: str, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
    """Writes a file of tensors, then `NAME.json` with its size and sha256, the `note`, or what went wrong."""
    path = part / f"{name}.json"
    try:
        file = files.write_tensors(part, f"{name}.safetensors", tensors)
        with files.naming(path):
            write_json(path, {"file": [file.name, file.nbytes, file.sha256], **note}, indent=None)
    except OSError as error:
        with suppress(OSError):  # else those who wait for it hear of it when the ranks meet
            write_json(path, {"fault": f"{error.filename}: {error.strerror or error}"}, indent=None)
        raise


def notes_of(part: Path, names: Sequence[str], is_given_up: threading.Event) -> list[dict[str, Any]]:
    """What all writers noted, in the order of `names`; waits for them. CheckpointError for a fault of any."""
    found = []
    for name in names:
        path = part / f"{name}.json"
        while not path.exists():
            if is_given_up.wait(POLL_SECONDS):
                raise files.CheckpointError(f"{name}: given up")
        note = json.loads(path.read_text(encoding="utf-8"))
        if "fault" in note:
            raise files.CheckpointError(note["fault"])
        found.append(note)
        path.unlink()
    return found
