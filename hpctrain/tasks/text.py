"""The task `text`: a small GPT learns to predict the next byte.

The built-in text is the language reference that every CPython ships, so the first run needs no download and still
learns something real. The yardstick is a table of byte pairs: a model that beats it has learnt from more than the
previous byte. torch comes in with the model only, so that options are checked without it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.tasks.corpus import Windows, read_bytes, shortest

if TYPE_CHECKING:
    from torch import Tensor, nn

UNIGRAM_WEIGHT = 5.0  # bytes; between 1 and 20 the built-in text gives the same to 0.005 bits
PROMPT_BYTES = 16
SAMPLE_BYTES = 200
TEMPERATURE = 0.7
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"  # stands for what a terminal would obey


@dataclass(frozen=True)
class Text:
    """A GPT over bytes and the text it reads. `data`: a file, a folder, or None for the built-in text.

    ValueError names the option that is out of range, or --data.
    """

    num_layers: int = field(default=6, metadata={"option": "layers"})  # and two ends: 8 layers, so up to 8 stages
    width: int = 64
    num_heads: int = field(default=2, metadata={"option": "heads"})
    context: int = 64
    dropout: float = 0.0
    data: str | None = None

    def __post_init__(self):
        _check("layers", self.num_layers, self.num_layers >= 1, "at least 1")
        _check("width", self.width, self.width >= 4, "at least 4: a LayerNorm of fewer passes nothing on")
        heads_fit = self.num_heads >= 1 and self.width % self.num_heads == 0
        _check("heads", self.num_heads, heads_fit, f"a divisor of width={self.width}")
        _check("context", self.context, self.context >= 2, "at least 2: attention over one byte is no choice")
        _check("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1")
        self._check_length()

    def _check_length(self) -> None:
        size, needed = self._content.size, shortest(self.context)
        if size < needed and self.data is not None:
            raise ValueError(
                f"--data {self.data}: {size} bytes are too few; one window to train on and one to hold out"
                f" take {needed} bytes at --task-option context={self.context}"
            )
        wanted = f"smaller: it takes {needed} bytes, the built-in text has {size}"
        _check("context", self.context, size >= needed, wanted)

    @cached_property
    def _content(self) -> np.ndarray:
        return read_bytes(self.data)

    def layers(self) -> list[Callable[[], nn.Module]]:
        """num_layers + 2 factories: int64 (batch, time <= context) in, scores (batch, time, 256) out."""
        from hpctrain.tasks import gpt

        return gpt.layer_factories(self.num_layers, self.width, self.num_heads, self.context, self.dropout)

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Cross entropy in nats: its sum over all positions, and their number."""
        from hpctrain.tasks import gpt

        return gpt.cross_entropy_sum(outputs, targets), targets.numel()

    def metric(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        """`loss` (nats) and `bits_per_byte`, each as (sum, number of bytes)."""
        total, count = self.loss(outputs, targets)
        return {"loss": (total.item(), count), "bits_per_byte": (total.item() / math.log(2), count)}

    def dataset(self, split: str) -> Windows:
        """Windows of `split` "train" or "eval": (input, target), int64 tensors of shape (context,)."""
        assert split in ("train", "eval"), split
        return Windows(self._content, self.context, held_out=split == "eval")

    def baseline(self) -> dict[str, float]:
        """What a table of byte pairs, counted on the training windows, reaches on the targets of the held-out ones.

        A pair's probability is (count + 5 * p(target)) / (sum of counts + 5), p the share of the byte with one added
        to each count (a Dirichlet prior; MacKay and Peto, 1995): harder to beat than one added to each pair.
        """
        trained, held_out = self.dataset("train").pair_counts(), self.dataset("eval").pair_counts()
        byte_share = (trained.sum(0) + 1) / (trained.sum() + 256)
        share = (trained + UNIGRAM_WEIGHT * byte_share) / (trained.sum(1, keepdims=True) + UNIGRAM_WEIGHT)
        nats = -float((held_out * np.log(share)).sum() / held_out.sum())
        return {"loss": nats, "bits_per_byte": nats / math.log(2)}

    def sample(self, forward: Callable[[Tensor], Tensor]) -> str:
        """The beginning of the held-out text and 200 bytes that the model continues it with, the same at every call.

        `forward` maps int64 (1, time <= context) to scores (1, time, 256).
        """
        from hpctrain.tasks import gpt

        prompt = self._content[:PROMPT_BYTES].tobytes()
        text = gpt.continue_bytes(forward, prompt, SAMPLE_BYTES, self.context, TEMPERATURE).decode(errors="replace")
        return "".join(letter if letter.isprintable() or letter in "\n\t" else UNPRINTABLE for letter in text)

    def data_sha256(self) -> str:
        """Hex digest of all bytes, those of a folder joined in order."""
        return hashlib.sha256(self._content).hexdigest()


def _check(option: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"--task-option {option}={value}: should be {wanted}")
