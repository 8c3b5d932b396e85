"""The task `images`: a convolutional network learns to tell classes of pictures apart.

The built-in pictures are scikit-learn's handwritten digits, 1797 of 8 x 8 pixels. The yardstick is the nearest mean
picture of a class, which needs no training: a network that beats it has learnt more than how a class looks on average.
torch comes in with the model only, so that options and data are checked without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.tasks.picture_arrays import open_arrays, prepare_arrays
from hpctrain.tasks.picture_files import folder_sha256, open_folder
from hpctrain.tasks.pictures import Pictures, Source, digits_file, open_digits
from hpctrain.tasks.protocol import check_option
from hpctrain.tasks.storage import DataError, Stamp, stamp

if TYPE_CHECKING:
    from torch import Tensor, nn

BASELINE_PICTURES = 2000  # of each split at most
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Images:
    """A network over pictures. `data`: a folder of class folders, an .npz file, or None for the built-in digits.

    `size` (pixels) and `channels` (1 or 3) are what pictures of a folder are made into; None: 32, and 1 where they are
    grey. ValueError names the option that is out of range, or --data.
    """

    num_blocks: int = field(default=6, metadata={"option": "blocks"})  # and two ends: 8 layers, so up to 8 stages
    width: int = 16
    dropout: float = 0.0
    size: int | None = None
    channels: int | None = None
    data: str | None = None

    def __post_init__(self):
        check_option("blocks", self.num_blocks, self.num_blocks >= 1, "at least 1")
        check_option("width", self.width, self.width >= 2, "at least 2")
        check_option("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1")
        folder = self.data is not None and os.path.isdir(self.data)
        if self.size is not None:
            check_option("size", self.size, folder, "left out: only pictures in a folder are resized")
            check_option("size", self.size, self.size >= 4, "at least 4")
        if self.channels is not None:
            check_option("channels", self.channels, folder, "left out: only pictures in a folder are converted")
            check_option("channels", self.channels, self.channels in (1, 3), "1 (grey) or 3 (RGB)")
        assert self._source.num_classes > 1

    @cached_property
    def _source(self) -> Source:
        if self.data is None:
            return open_digits()
        if not os.path.exists(self.data):
            raise DataError(f"--data {self.data}: no such file or folder")
        if os.path.isdir(self.data):
            return open_folder(self.data, self.size, self.channels)
        return open_arrays(self.data)

    def prepare(self) -> None:
        """Unpacks the pictures of an .npz file into the cache; otherwise there is nothing to do."""
        prepare_arrays(self._source)

    def layers(self) -> list[Callable[[], nn.Module]]:
        """num_blocks + 2 factories: floats (batch, channels, height, width) in, scores (batch, num_classes) out."""
        from hpctrain.tasks import convnet

        source = self._source
        return convnet.layer_factories(source.shape, source.num_classes, self.num_blocks, self.width, self.dropout)

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Cross entropy in nats: its sum over all pictures, and their number."""
        from hpctrain.tasks import convnet

        return convnet.cross_entropy_sum(outputs, targets), len(targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        """`loss` (nats) and `accuracy` (share of pictures), each as (sum, number of pictures)."""
        total, count = self.loss(outputs, targets)
        correct = (outputs.argmax(1) == targets).sum().item()
        return {"loss": (total.item(), count), "accuracy": (float(correct), count)}

    def dataset(self, split: str) -> Pictures:
        """Pictures of `split` "train" or "eval": (float32 (channels, height, width), int64 label)."""
        assert split in ("train", "eval"), split
        return self._source.train if split == "train" else self._source.eval

    def baseline(self) -> dict[str, float]:
        """The share of held-out pictures that lie nearest to the mean picture of their own class.

        Means are those of at most 2000 training pictures, evenly spread; at most 2000 held-out pictures count.
        """
        num_classes, train = self._source.num_classes, self._source.train
        means = np.zeros((num_classes, int(np.prod(self._source.shape))))
        counts = np.zeros(num_classes)
        for picture, label in _spread(train):
            means[label] += picture
            counts[label] += 1
        seen = np.flatnonzero(counts)
        means = means[seen] / counts[seen, None]
        correct = [
            seen[((means - picture) ** 2).sum(1).argmin()] == label for picture, label in _spread(self._source.eval)
        ]
        return {"accuracy": float(np.mean(correct))}

    def data_sha256(self) -> str:
        """Hex digest of the file's bytes, or of the names and bytes of all pictures of a folder."""
        if self.data is not None and os.path.isdir(self.data):
            return folder_sha256(self.data, self._source)
        return _file_sha256(self.data or str(digits_file()))

    def data_stamp(self) -> Stamp:
        """What changes when somebody changes the pictures. Nothing of them is read."""
        return stamp(self.data or digits_file())


def _spread(pictures: Pictures) -> Iterator[tuple[np.ndarray, int]]:
    """At most 2000 pictures of the split, from its beginning to its end: (flat float64 array, label)."""
    for index in np.linspace(0, len(pictures) - 1, min(len(pictures), BASELINE_PICTURES)).astype(int):
        yield pictures.read(int(index)).ravel().astype(np.float64), int(pictures.labels[index])


def _file_sha256(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"--data {path}: cannot read it: {error.strerror}") from None
    return digest.hexdigest()
