"""Labelled pictures: which of them are trained on and which held out; and the built-in ones.

Of pictures in files only the labels are held in memory: a picture is read when it is asked for, so there may be more of
them than memory holds. Where the data brings no split of its own, every tenth picture is held out, in a folder every
tenth of each class.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

HOLD_OUT_EVERY = 10
DIGITS_MEAN, DIGITS_STD = 4.884, 6.017  # of scikit-learn's digits, whose values are 0 to 16
INSTALL = 'pip install "hpctrain[data]"'


class Pixels(Protocol):
    """Where pictures come from."""

    def read(self, row: int) -> np.ndarray:
        """Picture `row`: a new float32 array of (channels, height, width)."""


class Pictures:
    """A map-style data set: item i is (picture, label), float32 (channels, height, width) and a scalar int64 tensor.

    `labels`: int64, one for each picture of the split; `rows`: which pictures of `pixels` those are.
    """

    def __init__(self, pixels: Pixels, labels: np.ndarray, rows: np.ndarray):
        assert len(labels) == len(rows), (len(labels), len(rows))
        self.pixels, self.labels, self.rows = pixels, labels, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import torch  # here, because the command line reads its errors from this module without torch

        if not 0 <= index < len(self):
            raise IndexError(f"picture {index} of {len(self)}")
        return torch.from_numpy(self.read(index)), torch.tensor(int(self.labels[index]))

    def read(self, index: int) -> np.ndarray:
        """The picture of item `index`, as a new float32 array of (channels, height, width)."""
        return self.pixels.read(int(self.rows[index]))


@dataclass(frozen=True)
class Source:
    """Two splits of pictures of one shape (channels, height, width), with labels from 0 to num_classes - 1."""

    shape: tuple[int, int, int]
    num_classes: int
    train: Pictures
    eval: Pictures


def hold_out(pixels: Pixels, labels: np.ndarray, shape: tuple[int, int, int], held_out: np.ndarray) -> Source:
    """A source of which the rows where `held_out` is true are the eval split."""
    splits = [Pictures(pixels, labels[rows], rows) for rows in map(np.flatnonzero, (~held_out, held_out))]
    return Source(shape, int(labels.max()) + 1, *splits)


def every_tenth(num_rows: int) -> np.ndarray:
    """True for the rows 0, 10, 20, ... of num_rows."""
    return np.arange(num_rows) % HOLD_OUT_EVERY == 0


def from_bytes(picture: np.ndarray) -> np.ndarray:
    """uint8 (height, width, channels) to float32 (channels, height, width) from -2 to 2."""
    return np.ascontiguousarray((picture.transpose(2, 0, 1).astype(np.float32) - 127.5) / 63.75)


class InMemory:
    """Pictures that are few and small."""

    def __init__(self, pictures: np.ndarray):
        self._pictures = pictures

    def read(self, row: int) -> np.ndarray:
        return self._pictures[row].copy()


def digits_file() -> Path:
    """scikit-learn's file of 1797 digits. It is found without importing scikit-learn, which takes a second."""
    spec = util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"--task images: the built-in pictures come with scikit-learn: {INSTALL}; or name a folder by --data"
        )
    path = Path(spec.origin).parent / "datasets/data/digits.csv.gz"
    if not path.is_file():
        raise ValueError(f"--task images: this scikit-learn has no {path}: {INSTALL}; or name a folder by --data")
    return path


def open_digits() -> Source:
    """Handwritten digits of 8 x 8 pixels in 10 classes, about half black, scaled to mean 0 and deviation 1."""
    table = np.loadtxt(digits_file(), delimiter=",", dtype=np.float32)
    pictures = (table[:, :64].reshape(-1, 1, 8, 8) - np.float32(DIGITS_MEAN)) / np.float32(DIGITS_STD)
    labels = table[:, 64].astype(np.int64)
    return hold_out(InMemory(pictures), labels, (1, 8, 8), every_tenth(len(labels)))
