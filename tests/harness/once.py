"""What all ranks of a launch would compute alike, computed by the first one that needs it."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PAUSE = 0.002  # seconds between two looks for a result


class Once:
    """Results in `folder`, which the ranks share; without a folder each process computes for itself."""

    def __init__(self):
        self.folder: Path | None = None

    def __call__(self, key: str, compute: Callable[[], T]) -> T:
        """What `compute` returns, by whichever process; `key` says all that it depends on.

        RuntimeError where another process failed to compute it.
        """
        if self.folder is None:
            return compute()
        file = self.folder / hashlib.sha256(key.encode()).hexdigest()[:32]
        try:
            os.close(os.open(file.with_suffix(".begun"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return _awaited(file, key)
        try:
            value = compute()
        except BaseException:
            file.with_suffix(".failed").touch()
            raise
        file.with_suffix(".part").write_bytes(pickle.dumps(value))
        file.with_suffix(".part").rename(file)
        return value


def _awaited(file: Path, key: str):
    while not file.exists():
        if file.with_suffix(".failed").exists():
            raise RuntimeError(f"another rank could not compute {key}")
        time.sleep(PAUSE)
    return pickle.loads(file.read_bytes())


once = Once()
