"""Pictures in folders of files, one folder for each class, decoded by Pillow when they are asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import numpy as np

from hpctrain.tasks.pictures import INSTALL, Source, every_tenth, from_bytes, hold_out
from hpctrain.tasks.storage import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
EVAL_FOLDERS = ("val", "eval", "test")
DEFAULT_SIZE = 32  # pixels
MODES = {1: "L", 3: "RGB"}
MODES_OF_GREY = ("1", "L", "I;16", "I")


class Files:
    """Pictures in files, scaled to size x size and to 1 (grey) or 3 (RGB) channels. `folder` is what --data names."""

    def __init__(self, folder: str, files: list[str], size: int, channels: int):
        self.folder, self.size, self.channels = folder, size, channels
        encoded = [os.fsencode(os.path.relpath(file, folder)) for file in files]
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self._names = b"".join(encoded)  # a million str objects would take five times the memory

    def path(self, row: int) -> str:
        start = int(self._ends[row - 1]) if row else 0
        return os.path.join(self.folder, os.fsdecode(self._names[start : self._ends[row]]))

    def read(self, row: int) -> np.ndarray:
        path = self.path(row)
        try:
            picture = _decode(path, self.size, self.channels)
        except Exception as error:  # what a decoder raises over damaged bytes is anybody's guess
            raise _unreadable(self.folder, path, error) from None
        return from_bytes(picture.reshape(self.size, self.size, self.channels))


def open_folder(folder: str, size: int | None, channels: int | None) -> Source:
    """Pictures in class folders, or in those of FOLDER/train and of FOLDER/val (or eval, or test).

    Classes are numbered in the order of their names. `channels`: None takes 1 where the first picture of each class is
    grey, else 3. DataError names the folder or file that does not fit.
    """
    if util.find_spec("PIL") is None:
        raise DataError(f"--data {folder}: pictures are decoded by Pillow: {INSTALL}")
    try:
        train, held_out = _splits(folder)
    except OSError as error:
        raise DataError(f"--data {folder}: cannot read {error.filename or folder}: {error.strerror}") from None
    channels = channels or _channels(folder, [files[0] for files in train])
    counts = [len(files) for files in train] + [len(files) for files in held_out]
    labels = np.repeat([*range(len(train)), *range(len(held_out))], counts)
    pixels = Files(folder, [file for files in train + held_out for file in files], size or DEFAULT_SIZE, channels)
    shape = (channels, pixels.size, pixels.size)
    if held_out:
        return hold_out(pixels, labels, shape, np.arange(len(labels)) >= sum(counts[: len(train)]))
    return hold_out(pixels, labels, shape, np.concatenate([every_tenth(count) for count in counts]))


def folder_sha256(folder: str, sources: Source) -> str:
    """Hex digest of the names and bytes of all pictures of a folder."""
    digest = hashlib.sha256()
    pixels = sources.train.pixels
    for row in sorted([*sources.train.rows, *sources.eval.rows]):
        path = pixels.path(int(row))
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise _unreadable(folder, path, error) from None
        digest.update(f"{os.path.relpath(path, folder)!r} {len(content)}\n".encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def _splits(folder: str) -> tuple[list[list[str]], list[list[str]]]:
    """The files of each class to train on, and those to evaluate on; none of the latter where they are not apart."""
    beside = [name for name in EVAL_FOLDERS if os.path.isdir(os.path.join(folder, name))]
    if not beside or not os.path.isdir(os.path.join(folder, "train")):
        classes = _classes(folder, folder)
        for name, files in classes.items():
            if len(files) < 2:
                raise DataError(
                    f"--data {folder}: the class folder {name} holds only one picture; it takes 2, one is held out"
                )
        return list(classes.values()), []
    train, held_out = (_classes(folder, os.path.join(folder, name)) for name in ("train", beside[0]))
    if different := sorted(train.keys() ^ held_out.keys()):
        has, lacks = ("train", beside[0]) if different[0] in train else (beside[0], "train")
        raise DataError(f"--data {folder}: {has} has a class folder {different[0]}, {lacks} has none")
    return list(train.values()), list(held_out.values())


def _classes(data: str, folder: str) -> dict[str, list[str]]:
    names = sorted(each.name for each in os.scandir(folder) if each.is_dir() and not each.name.startswith("."))
    if len(names) < 2:
        found = f"only one class folder, {names[0]}" if names else "no class folder"
        raise DataError(
            f"--data {data}: {folder} holds {found}; put the pictures of each class into a folder of theirs"
        )
    classes = {name: sorted(_files(os.path.join(folder, name))) for name in names}
    for name, files in classes.items():
        if not files:
            known = ", ".join(suffix[1:] for suffix in SUFFIXES)
            raise DataError(f"--data {data}: the class folder {os.path.join(folder, name)} holds no picture ({known})")
    return classes


def _files(folder: str) -> Iterator[str]:
    for place, subfolders, names in os.walk(folder, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        pictures = (name for name in names if not name.startswith(".") and name.lower().endswith(SUFFIXES))
        yield from (file for file in (os.path.join(place, name) for name in pictures) if os.path.isfile(file))


def _raise(error: OSError) -> None:
    raise error


def _channels(folder: str, files: list[str]) -> int:
    from PIL import Image

    for file in files:
        try:
            with Image.open(file) as image:
                if image.mode not in MODES_OF_GREY:
                    return 3
        except Exception as error:
            raise _unreadable(folder, file, error) from None
    return 1


def _decode(path: str, size: int, channels: int) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would cut off at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert(MODES[channels])
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image)


def _unreadable(folder: str, file: str, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or type(error).__name__
    if isinstance(error, OSError) and not error.errno:
        reason = "not a picture, or a damaged one"
    return DataError(f"--data {folder}: cannot read the picture {file}: {reason}")
