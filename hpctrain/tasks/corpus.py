"""Text as bytes: the built-in one, a file, or the files of a folder.

Bytes need no vocabulary, so every file of every language works and the loss is comparable between models. No text is
held in memory but the built-in one: a file or a folder may be larger, and is read in ranges.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

import numpy as np

from hpctrain.tasks.storage import DataError, FileArray
from hpctrain.tasks.tokens import SUFFIXES as TOKEN_SUFFIXES
from hpctrain.tasks.windows import Content

SNIFFED_BYTES = 1 << 16  # a NUL among the first bytes is what tells binary from text, as git and grep have it
OPEN_FILES = 64  # of a folder, at a time
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a link to nothing


class InMemory:
    """An array as content."""

    def __init__(self, array: np.ndarray):
        self._array, self.dtype = array, array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._array[start:stop].copy()


class JoinedFiles:
    """The bytes of files of a folder, one after the other; at most 64 of them are open at a time."""

    dtype = np.dtype(np.uint8)

    def __init__(self, folder: str, files: list[str], sizes: list[int]):
        self._arguments = folder, files, sizes
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._file = lru_cache(OPEN_FILES)(partial(_part, folder, files, sizes))  # one dropped is closed with it

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, np.uint8)]
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            file, end = self._file(number), int(self._ends[number])
            first = start - (end - len(file))
            parts.append(file.read(first, first + min(stop, end) - start))
            start, number = min(stop, end), number + 1
        return np.concatenate(parts)

    def __reduce__(self):
        return JoinedFiles, self._arguments


def _part(folder: str, files: list[str], sizes: list[int], number: int) -> FileArray:
    return FileArray(files[number], np.uint8, shape=(sizes[number],), name=f"--data {folder}")


def open_text(path: str | None) -> Content:
    """All bytes (uint8) of a file, or of the text files of a folder one after the other; none is read but their starts.

    A folder is taken with its subfolders, in the order of the paths; hidden, empty and binary files are left out.
    None is the language reference that Python itself ships. DataError names --data and the path.
    """
    if path is None:
        return _language_reference()
    if not os.path.exists(path):
        raise DataError(f"--data {path}: no such file or folder")
    return _open_folder(path) if os.path.isdir(path) else _open_file(path)


def _language_reference() -> InMemory:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "--data: this Python lacks pydoc_data, the built-in text; name a file or folder of text"
        ) from None
    return InMemory(np.frombuffer("".join(topics[key] for key in sorted(topics)).encode(), np.uint8))


def _open_file(path: str) -> FileArray:
    if not os.path.isfile(path):
        raise DataError(f"--data {path}: neither a file nor a folder")
    content = FileArray(path, np.uint8)
    if not len(content):
        raise DataError(f"--data {path}: the file is empty")
    if (place := content.read(0, min(SNIFFED_BYTES, len(content))).tobytes().find(0)) >= 0:
        raise DataError(f"--data {path}: not text, byte {place} is NUL; save a text in UTF-16 as UTF-8")
    content.close()  # what is read later is what stands there then, as its stamp says
    return content


def _open_folder(path: str) -> JoinedFiles:
    try:
        found = {file: size for file in _files(path) if (size := _text_size(file))}
    except OSError as error:
        raise DataError(f"--data {path}: cannot read {error.filename or path}: {error.strerror}") from None
    if not found:
        raise DataError(f"--data {path}: the folder holds no text file; hidden, empty and binary files do not count")
    _refuse_tokens(path, found)
    files = sorted(found, key=lambda file: file.split(os.sep))
    return JoinedFiles(path, files, [found[file] for file in files])


def _refuse_tokens(path: str, found: Iterable[str]) -> None:
    """A folder is text; the JSON beside a token file would be read as such."""
    for file in found:
        stem, suffix = os.path.splitext(file)
        for tokens in (stem + each for each in TOKEN_SUFFIXES if suffix == ".json"):
            if os.path.exists(tokens):
                raise DataError(f"--data {path}: the folder holds a token file; name it: --data {tokens}")


def _files(path: str) -> Iterator[str]:
    """Files under `path`, hidden ones and those in hidden folders left out."""
    for folder, subfolders, names in os.walk(path, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _text_size(file: str) -> int:
    """Bytes of a text file; 0 for a binary one and for what is no file."""
    try:
        facts = os.stat(file)
    except OSError as error:
        if error.errno in NO_FILE:
            return 0
        raise
    if not stat.S_ISREG(facts.st_mode) or not facts.st_size:
        return 0
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return 0 if 0 in os.read(descriptor, SNIFFED_BYTES) else facts.st_size
    finally:
        os.close(descriptor)
