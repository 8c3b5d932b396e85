"""Numbers in files that may be larger than memory, and files made from them once.

Files are read by position and never mapped: a mapped file that becomes shorter kills the process by SIGBUS without a
word, and the pages of a mapped file count as memory of the process. What is read here is a copy of the rows asked for,
so a run takes as much memory for a terabyte as for a megabyte.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PIECE_BYTES = 4 << 20  # of a scan: large enough for full disk speed, and small beside the model
CACHE = "HPCTRAIN_CACHE"
OPENING = threading.Lock()  # threads that read the same file open it once


class DataError(ValueError):
    """Data that cannot be used. The message is the line that the user sees; it begins with `--data PATH: `."""


class CacheError(DataError):
    """The cache folder cannot be used; the message names HPCTRAIN_CACHE."""


class FileArray:
    """Numbers in a file as an array that is read in ranges of its first axis, from `offset` bytes on.

    Without a `shape` it has one axis and all whole items up to the end of the file. `name` is what errors begin with
    where the user does not know the file under its path. The file is opened at the first read, in each process that
    reads; a deleted file stays readable while it is open. DataError where the file cannot be read.
    """

    def __init__(
        self,
        path: str | Path,
        dtype,
        offset: int = 0,
        shape: tuple[int, ...] | None = None,
        name: str | None = None,
    ):
        self.path, self.name = str(path), name or f"--data {path}"
        self._descriptor: int | None = None
        self._stored, self._offset = np.dtype(dtype), offset
        self.dtype = self._stored.newbyteorder("=")
        if shape is None:
            size = self._call(os.stat, self.path).st_size
            shape = (max(0, size - offset) // self._stored.itemsize,)
        self.shape = tuple(shape)
        self._row_bytes = self._stored.itemsize * math.prod(self.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): a new writable array, native byte order. DataError where the file became shorter."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        rows = np.empty((stop - start, *self.shape[1:]), self._stored)
        rest = memoryview(rows.reshape(-1).view(np.uint8))
        place = self._offset + start * self._row_bytes
        with OPENING:
            if self._descriptor is None:
                self._descriptor = self._call(os.open, self.path, os.O_RDONLY | os.O_CLOEXEC)
        while rest:
            got = self._call(os.preadv, self._descriptor, [rest], place)
            if not got:
                raise DataError(f"{self.name}: {self.path} became shorter while it was read")
            rest, place = rest[got:], place + got
        return rows if self._stored.isnative else rows.astype(self.dtype)

    def pieces(self, rows: int | None = None) -> Iterator[np.ndarray]:
        """All rows in consecutive arrays of `rows` rows, by default of about 4 MiB; the last may be shorter."""
        rows = rows or max(1, PIECE_BYTES // max(1, self._row_bytes))
        for start in range(0, len(self), rows):
            yield self.read(start, min(start + rows, len(self)))

    def close(self) -> None:
        """Gives the file back; the next read opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _call(self, function, *arguments):
        try:
            return function(*arguments)
        except OSError as error:
            raise DataError(f"{self.name}: cannot read {self.path}: {error.strerror}") from None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_descriptor": None}  # a descriptor means nothing in another process

    def __del__(self):
        if getattr(self, "_descriptor", None) is not None:
            self.close()


def open_npy(path: str | Path) -> FileArray:
    """The array in a .npy file, nothing of it read but the header. DataError where it is no array of plain numbers."""
    wanted = "np.save(path, np.ascontiguousarray(array)) writes one that fits"
    try:
        with open(path, "rb") as stream:
            version = np.lib.format.read_magic(stream)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, in_columns, dtype = read_header(stream)
            offset, size = stream.tell(), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise DataError(f"--data {path}: cannot read it: {error.strerror}") from None
    except Exception:  # the header is parsed as Python: what a damaged one raises is anybody's guess
        raise DataError(f"--data {path}: not a .npy file; {wanted}") from None
    if dtype.kind not in "biufc":
        raise DataError(f"--data {path}: holds items of type {dtype}, which are no plain numbers; {wanted}")
    if in_columns and len(shape) > 1:
        raise DataError(f"--data {path}: stored column by column (Fortran order); {wanted}")
    if not shape or min(shape) < 0:
        raise DataError(f"--data {path}: holds a single number, not an array with a first axis; {wanted}")
    if size < (needed := offset + math.prod(shape) * dtype.itemsize):
        raise DataError(f"--data {path}: the file has {size} bytes, its header promises {needed}; copy it again")
    return FileArray(path, dtype, offset, shape)


def cached(key: str, suffix: str, write: Callable[[Path], None]) -> Path:
    """The file of the cache folder that belongs to `key`; where it is missing, `write(temporary)` makes it.

    The folder is $HPCTRAIN_CACHE, else $XDG_CACHE_HOME/hpctrain, else ~/.cache/hpctrain. The file is whole or not
    there, also where processes make it at once or are killed. CacheError where the folder cannot be used or its disk
    is full.
    """
    folder = _cache_folder()
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    path, temporary = folder / (name + suffix), folder / f".{name}-{uuid.uuid4().hex}{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return path
        try:
            write(temporary)
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(
            f"{CACHE}: cannot keep a file in {folder}: {error.strerror}; set {CACHE} to a folder with room"
        ) from None
    return path


def _cache_folder() -> Path:
    if folder := os.environ.get(CACHE):
        return Path(folder).absolute()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder).absolute() / "hpctrain"
    try:
        return Path.home() / ".cache" / "hpctrain"
    except RuntimeError:
        raise CacheError(f"{CACHE}: this user has no home folder; set {CACHE} to a folder with room") from None


@dataclass(frozen=True)
class Stamp:
    """What a file or folder was at one time: a digest of which files, with inode, size and time of change."""

    path: str
    digest: str | None  # None: there is nothing


def stamp(path: str | Path) -> Stamp:
    """The present state of a file, or of all files of a folder that are not hidden. Nothing of them is read."""
    path, digest = os.fspath(path), hashlib.sha256()
    try:
        facts = os.stat(path)
        if not stat.S_ISDIR(facts.st_mode):
            _note(digest, "", facts)
            return Stamp(path, digest.hexdigest())
    except OSError:
        return Stamp(path, None)
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            try:
                _note(digest, file := os.path.join(folder, name), os.stat(file))
            except OSError:
                pass  # a dangling link, or deleted since it was listed: not there, which is what the digest says
    return Stamp(path, digest.hexdigest())


def _note(digest, name: str, facts: os.stat_result) -> None:
    digest.update(f"{name!r} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}\n".encode(errors="surrogateescape"))
