"""Pictures in arrays of an .npz file, as Keras keeps its data sets.

The members of an .npz are compressed: to read one picture is to unpack all before it. So `prepare` writes each array of
pictures into the cache once for each node, as .npy, and rows are read from there; no rank holds them in memory.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from hpctrain.tasks.pictures import Pictures, Source, every_tenth, from_bytes, hold_out
from hpctrain.tasks.storage import DataError, FileArray, cached, open_npy, stamp

WITH_SPLIT = ("x_train", "y_train", "x_test", "y_test")
PAIRS = (("x_train", "y_train"), ("x", "y"), ("images", "labels"))
TAKEN = "x_train, y_train, x_test, y_test, or x, y, or images, labels"
MAX_CHANNELS = 4
MIN_SIDE = 4  # pixels
PIECE_BYTES = 1 << 20
READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
START_OF_ZIP, START_OF_EMPTY_ZIP = b"PK\x03\x04", b"PK\x05\x06"


class Header(NamedTuple):
    """What the beginning of a member says."""

    shape: tuple[int, ...]
    in_columns: bool
    dtype: np.dtype


class Member:
    """One array of pictures in an .npz: uint8 or floats (rows, height, width) or (rows, height, width, channels)."""

    def __init__(self, file: str, name: str, header: Header):
        self.file, self.name, self.shape, self.dtype = file, name, header.shape, header.dtype
        _check_pictures(self._fault, header)
        self._array: FileArray | None = None

    def read(self, row: int) -> np.ndarray:
        """float32 (channels, height, width): of uint8 from -2 to 2, of floats as they are."""
        picture = self.unpacked().read(row, row + 1)[0]
        picture = picture[..., None] if picture.ndim == 2 else picture
        if picture.dtype == np.uint8:
            return from_bytes(picture)
        return np.ascontiguousarray(picture.transpose(2, 0, 1), dtype=np.float32)

    def picture_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        height, width, *channels = self.shape[1:]
        return (*channels, 1)[0], height, width

    def unpacked(self) -> FileArray:
        """The array, readable by rows: from the cache, into which it is written where it is missing."""
        if self._array is None:
            key = f"{os.path.abspath(self.file)} {self.name} {stamp(self.file).digest}"
            self._array = open_npy(cached(key, ".npy", self._write))
            self._array.name = f"--data {self.file}"
        return self._array

    def _write(self, path: Path) -> None:
        with path.open("wb") as stream:
            for piece in _pieces(self.file, self.name):
                stream.write(piece)
        with _reading(self.file):
            if np.prod(self.shape, dtype=np.int64) * self.dtype.itemsize + _data_offset(path) != path.stat().st_size:
                raise EOFError

    def _fault(self, fault: str) -> DataError:
        return DataError(f"--data {self.file}: {self.name} {fault}")


def open_arrays(file: str) -> Source:
    """The pictures of an .npz file: labels are read, of the pictures only what the arrays' headers say.

    DataError names the array that does not fit.
    """
    headers = _headers(file)
    names = (
        WITH_SPLIT if headers.keys() & set(WITH_SPLIT[2:]) else next((p for p in PAIRS if headers.keys() & {*p}), ())
    )
    if missing := [name for name in names if name not in headers] or not names:
        lacks = f"lacks {', '.join(missing)}" if names else "lacks pictures and labels"
        raise DataError(f"--data {file}: {lacks}; it has {', '.join(headers) or 'no arrays'}; wanted are {TAKEN}")
    pairs = [_pair(file, headers, *names[i : i + 2]) for i in range(0, len(names), 2)]
    (pixels, labels), *apart = pairs
    if labels.max() == 0:
        raise DataError(f"--data {file}: {names[1]} has the label 0 only; there is no choice to learn")
    if not apart:
        return hold_out(pixels, labels, pixels.picture_shape(), every_tenth(len(labels)))
    ((others, other_labels),) = apart
    if (others.shape[1:], others.dtype) != (pixels.shape[1:], pixels.dtype):
        kinds = [f"{each.name} has {each.dtype} pictures of shape {each.shape[1:]}" for each in (pixels, others)]
        raise DataError(f"--data {file}: {', '.join(kinds)}; they should be alike")
    if other_labels.max() > labels.max():
        raise DataError(
            f"--data {file}: {names[3]} has the label {other_labels.max()}, {names[1]} none above {labels.max()}"
        )
    splits = [Pictures(each, its_labels, np.arange(len(its_labels))) for each, its_labels in pairs]
    return Source(pixels.picture_shape(), int(labels.max()) + 1, *splits)


def prepare_arrays(source: Source) -> None:
    """Writes the arrays of pictures into the cache, where they are missing."""
    for split in (source.train, source.eval):
        if isinstance(split.pixels, Member):
            split.pixels.unpacked()


def _headers(file: str) -> dict[str, Header]:
    """What the headers of all arrays in an .npz say, by their names."""
    with _reading(file), open(file if os.path.isfile(file) else os.devnull, "rb") as stream:
        start = stream.read(len(START_OF_ZIP))
    if start not in (START_OF_ZIP, START_OF_EMPTY_ZIP):
        raise DataError(f"--data {file}: neither a folder nor an .npz file")
    headers = {}
    with _reading(file), zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith(".npy"):
                with archive.open(name) as member:
                    headers[name.removesuffix(".npy")] = _header(member)
    return headers


def _header(stream: BinaryIO) -> Header:
    return Header(*READ_HEADER[npy.read_magic(stream)](stream))


def _data_offset(path: Path) -> int:
    with path.open("rb") as stream:
        _header(stream)
        return stream.tell()


def _pieces(file: str, name: str) -> Iterator[bytes]:
    """The bytes of a member. What goes wrong where they are written is not caught here."""
    with _reading(file), zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as member:
        while piece := member.read(PIECE_BYTES):
            yield piece


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Makes a DataError of what happens where a file cannot be read, or is damaged."""
    try:
        yield
    except OSError as error:
        raise DataError(f"--data {file}: cannot read it: {error.strerror or error}") from None
    except Exception:  # zipfile, zlib and a header parsed as Python: what they raise is anybody's guess
        raise DataError(f"--data {file}: the file is cut off or damaged; copy it again") from None


def _pair(file: str, headers: dict[str, Header], x: str, y: str) -> tuple[Member, np.ndarray]:
    member, header = Member(file, x, headers[x]), headers[y]
    rows = member.shape[0]
    if header.dtype.kind not in "iu":
        raise DataError(f"--data {file}: {y} holds {header.dtype}; labels are whole numbers from 0")
    if header.shape not in ((rows,), (rows, 1)):
        raise DataError(f"--data {file}: {y} has the shape {header.shape}, {x} has {rows} rows; wanted is ({rows},)")
    with _reading(file), zipfile.ZipFile(file) as archive, archive.open(f"{y}.npy") as stream:
        labels = npy.read_array(stream, allow_pickle=False).reshape(-1)
    if labels.min() < 0 or labels.max() >= rows:
        worst = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"--data {file}: {y} has the label {worst}; number the classes from 0 without gaps")
    return member, labels.astype(np.int64)


def _check_pictures(fault: Callable[[str], DataError], header: Header) -> None:
    shape, in_columns, dtype = header
    if dtype.hasobject:
        raise fault("holds Python objects, which are never loaded; save numbers: np.asarray(x, 'uint8')")
    if dtype != np.uint8 and dtype.kind != "f":
        raise fault(f"holds {dtype}; pictures are uint8 or floats")
    if len(shape) not in (3, 4) or min(shape[1:3]) < MIN_SIDE or not 1 <= (*shape, 1)[3] <= MAX_CHANNELS:
        wanted = f"(rows, height, width) or (rows, height, width, channels), sides of {MIN_SIDE} or more"
        raise fault(f"has the shape {shape}; wanted is {wanted}, 1 to {MAX_CHANNELS} channels")
    if shape[0] < 2:
        raise fault(f"has {shape[0]} rows; there should be at least 2")
    if in_columns:
        raise fault("is stored column by column (Fortran order); save np.ascontiguousarray of it")
