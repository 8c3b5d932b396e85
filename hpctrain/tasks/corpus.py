"""Text as bytes: where it comes from, and which windows of it are trained on and which held out.

Bytes need no vocabulary, so every file of every language works and the loss is comparable between models. The text is
cut into blocks of 16 windows; every tenth block, the first one included, is held out. Held-out text thus comes from all
over the corpus, and no byte of it is in a training window. Nothing is stored per window: a file larger than memory is
mapped, and the place of a window follows from its number.

    block 0 (held out)   block 1 .. 9 (training)   block 10 (held out) ...
    |-w-|-w-|..|-w-|     each window: context bytes as input, the same moved by one as targets
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

WINDOWS_PER_BLOCK = 16
HOLD_OUT_EVERY = 10
SNIFFED_BYTES = 1 << 16  # a NUL among the first bytes is what tells binary from text, as git and grep have it
COUNTED_WINDOWS = 4096  # at a time, so that counting takes little memory


def read_bytes(path: str | None) -> np.ndarray:
    """All bytes (uint8) of a file, which is mapped, or of the text files of a folder, which are joined in memory.

    A folder is read with its subfolders, in the order of the paths; hidden, empty and binary files are left out.
    None is the language reference that Python itself ships. ValueError names --data and the path.
    """
    if path is None:
        return _language_reference()
    if not os.path.exists(path):
        raise ValueError(f"--data {path}: no such file or folder")
    try:
        return _read_folder(path) if os.path.isdir(path) else _map_file(path)
    except OSError as error:
        raise ValueError(f"--data {path}: cannot read {error.filename or path}: {error.strerror}") from None


def shortest(context: int) -> int:
    """The fewest bytes that hold one training window and one held-out window."""
    return _block_bytes(context) + context + 1


class Windows:
    """A map-style data set of one split: item i is (input, target), two int64 tensors of shape (context,)."""

    def __init__(self, content: np.ndarray, context: int, held_out: bool):
        self.content, self.context, self.held_out = content, context, held_out
        num_blocks, rest = divmod(len(content), _block_bytes(context))
        num_held_out = -(-num_blocks // HOLD_OUT_EVERY)
        self._num_windows = WINDOWS_PER_BLOCK * (num_held_out if held_out else num_blocks - num_held_out)
        if (num_blocks % HOLD_OUT_EVERY == 0) == held_out:  # the last, shorter block
            self._num_windows += max(0, rest - 1) // context

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import torch  # here, because the command line reads its errors from this module without torch

        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = int(self.starts(index))
        window = torch.from_numpy(self.content[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]

    def starts(self, index: int | np.ndarray) -> int | np.ndarray:
        """Offset of the first of the context + 1 bytes of window `index`."""
        block, window = index // WINDOWS_PER_BLOCK, index % WINDOWS_PER_BLOCK
        per_group = HOLD_OUT_EVERY - 1
        block = block * HOLD_OUT_EVERY if self.held_out else block // per_group * HOLD_OUT_EVERY + block % per_group + 1
        return block * _block_bytes(self.context) + window * self.context

    def pair_counts(self) -> np.ndarray:
        """How often each target follows each input byte: int64 (256, 256), [input, target]."""
        counts = np.zeros(256 * 256, np.int64)
        for first in range(0, len(self), COUNTED_WINDOWS):
            starts = self.starts(np.arange(first, min(first + COUNTED_WINDOWS, len(self))))
            rows = self.content[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)
            counts += np.bincount((rows[:, :-1] * 256 + rows[:, 1:]).ravel(), minlength=counts.size)
        return counts.reshape(256, 256)


def _block_bytes(context: int) -> int:
    """Windows follow each other; the first byte of a block is only ever an input."""
    return WINDOWS_PER_BLOCK * context + 1


def _language_reference() -> np.ndarray:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "--data: this Python lacks pydoc_data, the built-in text; name a file or folder of text"
        ) from None
    return np.frombuffer("".join(topics[key] for key in sorted(topics)).encode(), np.uint8)


def _map_file(path: str) -> np.ndarray:
    if not os.path.isfile(path):
        raise ValueError(f"--data {path}: neither a file nor a folder")
    if not os.path.getsize(path):
        raise ValueError(f"--data {path}: the file is empty")
    content = np.memmap(path, np.uint8, "r")
    if (place := content[:SNIFFED_BYTES].tobytes().find(0)) >= 0:
        raise ValueError(f"--data {path}: not text, byte {place} is NUL; save a text in UTF-16 as UTF-8")
    return content


def _read_folder(path: str) -> np.ndarray:
    content = b"".join(_read_text(file) for file in sorted(_files(path)))
    if not content:
        raise ValueError(f"--data {path}: the folder holds no text file; hidden, empty and binary files do not count")
    return np.frombuffer(content, np.uint8)


def _files(path: str) -> Iterator[Path]:
    """Regular files under `path`, hidden ones and those in hidden folders left out."""
    for folder, subfolders, names in os.walk(path, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _raise(error: OSError) -> None:
    raise error


def _read_text(file: Path) -> bytes:
    """The bytes of a text file; none of a binary one."""
    with file.open("rb") as stream:
        start = stream.read(SNIFFED_BYTES)
        return b"" if 0 in start else start + stream.read()
