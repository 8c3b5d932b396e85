"""Which windows of a text are trained on and which held out, and what is counted in them.

The text, bytes or token ids, is cut into blocks of 16 windows; every tenth block, the first one included, is held out.
Held-out text thus comes from all over the corpus, and no item of it is in a training window. Nothing is stored per
window and no text is held in memory: the place of a window follows from its number, and its items are read when they
are asked for.

    block 0 (held out)   block 1 .. 9 (training)   block 10 (held out) ...
    |-w-|-w-|..|-w-|     each window: context items as input, the same moved by one as targets
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hpctrain.tasks.storage import PIECE_BYTES, CacheError, DataError, Stamp, cached

if TYPE_CHECKING:
    from torch import Tensor

WINDOWS_PER_BLOCK = 16
HOLD_OUT_EVERY = 10
COUNTED_WINDOWS = 1 << 16  # for the yardstick; the share of what it counts is then known well enough
COUNTED_TOGETHER = 1 << 18  # items, so that counting takes little memory
KEPT_FROM = 64 << 20  # bytes; to scan less than this takes a fraction of a second


class Content(Protocol):
    """Bytes or token ids in a row, of any length: an unsigned `dtype`, read in ranges."""

    dtype: np.dtype

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Items [start, stop) as a new array. DataError where they cannot be read any more."""


def shortest(context: int) -> int:
    """The fewest bytes or tokens that hold one training window and one held-out window."""
    return _block_length(context) + context + 1


class Windows:
    """A map-style data set of one split: item i is (input, target), two int64 tensors of shape (context,).

    With a `vocab_size` an item that is not below it is a DataError: somebody wrote to the file after it was checked.
    """

    def __init__(self, content: Content, context: int, held_out: bool, vocab_size: int | None = None):
        self.content, self.context, self.held_out, self.vocab_size = content, context, held_out, vocab_size
        num_blocks, rest = divmod(len(content), _block_length(context))
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
        window = torch.from_numpy(self._read(index))
        if self.vocab_size is not None and (largest := int(window.max())) >= self.vocab_size:
            raise DataError(
                f"--data: id {largest} is not below vocab_size {self.vocab_size}; somebody changed the file meanwhile"
            )
        return window[:-1], window[1:]

    def starts(self, index: int | np.ndarray) -> int | np.ndarray:
        """Offset of the first of the context + 1 items of window `index`."""
        block, window = index // WINDOWS_PER_BLOCK, index % WINDOWS_PER_BLOCK
        per_group = HOLD_OUT_EVERY - 1
        block = block * HOLD_OUT_EVERY if self.held_out else block // per_group * HOLD_OUT_EVERY + block % per_group + 1
        return block * _block_length(self.context) + window * self.context

    def pair_counts(self, vocab_size: int) -> np.ndarray:
        """How often each target follows each input: int64 (vocab_size, vocab_size), [input, target].

        Counted over at most 65,536 windows, evenly spread.
        """
        counts = np.zeros(vocab_size * vocab_size, np.int64)
        for rows in self._counted():
            counts += np.bincount((rows[:, :-1] * vocab_size + rows[:, 1:]).ravel(), minlength=counts.size)
        return counts.reshape(vocab_size, vocab_size)

    def target_counts(self, vocab_size: int) -> np.ndarray:
        """How often each token is a target, in the windows of `pair_counts`: int64 (vocab_size,)."""
        counts = np.zeros(vocab_size, np.int64)
        for rows in self._counted():
            counts += np.bincount(rows[:, 1:].ravel(), minlength=vocab_size)
        return counts

    def _counted(self) -> Iterator[np.ndarray]:
        """The windows that are counted, some rows (number, context + 1) int64 at a time."""
        number = min(len(self), COUNTED_WINDOWS)
        together = max(1, COUNTED_TOGETHER // self.context)
        for first in range(0, number, together):
            places = range(first, min(first + together, number))
            yield np.stack([self._read(place * len(self) // number) for place in places])

    def _read(self, index: int) -> np.ndarray:
        start = int(self.starts(int(index)))
        return self.content.read(start, start + self.context + 1).astype(np.int64)


class Scan(NamedTuple):
    """What one pass over a content tells: a digest of its items, the largest one, and the first place of that."""

    sha256: str
    largest: int
    place: int


def scan(content: Content, before: Stamp | None) -> Scan:
    """Reads all of `content`; what takes long is kept in the cache, under the stamp of its files."""
    if before is None or len(content) * content.dtype.itemsize < KEPT_FROM:
        return _scan(content)
    key = f"scan of {os.path.abspath(before.path)} {before.digest} as {len(content)} {content.dtype}"
    try:
        path = cached(key, ".json", lambda temporary: temporary.write_text(json.dumps(_scan(content))) and None)
    except CacheError:
        return _scan(content)  # slower on the other ranks of this node, but no reason to end
    return Scan(*json.loads(path.read_text()))


def pieces(content: Content, size: int) -> Iterator[np.ndarray]:
    """All of `content` in consecutive arrays of `size` items; the last may be shorter."""
    for start in range(0, len(content), size):
        yield content.read(start, min(start + size, len(content)))


def _block_length(context: int) -> int:
    """Windows follow each other; the first item of a block is only ever an input."""
    return WINDOWS_PER_BLOCK * context + 1


def _scan(content: Content) -> Scan:
    digest, largest, place, start = hashlib.sha256(), -1, -1, 0
    for piece in pieces(content, PIECE_BYTES // content.dtype.itemsize):
        digest.update(piece)
        if (top := int(piece.max())) > largest:
            largest, place = top, start + int(piece.argmax())
        start += len(piece)
    return Scan(digest.hexdigest(), largest, place)
