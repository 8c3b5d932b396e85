"""The task `text`: a small GPT learns to predict the next byte or token.

The built-in text is the language reference that every CPython ships, so the first run needs no download and still
learns something real. The yardstick is a table of pairs: a model that beats it has learnt from more than the previous
byte. Where a vocabulary makes that table too large, it is the frequencies of the tokens. torch comes in with the model
only, so that options are checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.tasks import tokens
from hpctrain.tasks.corpus import open_text
from hpctrain.tasks.protocol import check_option
from hpctrain.tasks.storage import DataError, Stamp, stamp
from hpctrain.tasks.windows import Content, Scan, Windows, scan, shortest

if TYPE_CHECKING:
    from torch import Tensor, nn

NUM_BYTES = 256
MAX_PAIRED = (
    1024  # tokens of a vocabulary whose pairs are counted, in 8 MiB; there are few of each pair in a larger one
)
UNIGRAM_WEIGHT = 5.0  # bytes; between 1 and 20 the built-in text gives the same to 0.005 bits
PROMPT_LENGTH = 16
SAMPLE_LENGTH = 200
TEMPERATURE = 0.7
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"  # stands for what a terminal would obey


@dataclass(frozen=True)
class Text:
    """A GPT over bytes or tokens and the text it reads.

    `data`: a file or folder of text, a file of token ids (tokens.npy or tokens.bin), or None for the built-in text.
    `tokenizer`: a file of the `tokenizers` library that makes tokens of the text; without it the bytes are read.
    ValueError names the option that is out of range, or --data.
    """

    num_layers: int = field(default=6, metadata={"option": "layers"})  # and two ends: 8 layers, so up to 8 stages
    width: int = 64
    num_heads: int = field(default=2, metadata={"option": "heads"})
    context: int = 64
    dropout: float = 0.0
    tokenizer: str = ""
    data: str | None = None

    def __post_init__(self):
        check_option("layers", self.num_layers, self.num_layers >= 1, "at least 1")
        check_option("width", self.width, self.width >= 4, "at least 4: a LayerNorm of fewer passes nothing on")
        heads_fit = self.num_heads >= 1 and self.width % self.num_heads == 0
        check_option("heads", self.num_heads, heads_fit, f"a divisor of width={self.width}")
        check_option("context", self.context, self.context >= 2, "at least 2: attention over one byte is no choice")
        check_option("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1")
        if self.tokenizer and tokens.holds_tokens(self.data):
            raise DataError(
                f"{tokens.option(self.tokenizer)}: --data {self.data} holds token ids already; leave the option out"
            )
        if self.tokenizer:
            tokens.check_tokenizer(self.tokenizer)
            len(self._source)  # opened: what cannot be read is refused here
        else:
            self.dataset("train")  # and what is too short

    def prepare(self) -> None:
        """What takes long and one process of each node does before any other reads: encodes the text, checks the ids.

        ValueError where the data cannot be used. All that follows works in any process of the node with equal options.
        """
        if tokens.holds_tokens(self.data):
            tokens.check_ids(self.data, self._tokens, self._scan)
            if path := self._tokens.tokenizer:
                tokens.load_tokenizer(path, f"--data {self.data}: tokenizer {path}")
        self.dataset("train")
        self.data_sha256()

    @cached_property
    def _source(self) -> Content:
        """What --data holds, before a tokenizer."""
        return self._tokens.ids if tokens.holds_tokens(self.data) else open_text(self.data)

    @cached_property
    def _scan(self) -> Scan:
        return scan(self._source, self.data_stamp())

    @cached_property
    def _tokens(self) -> tokens.Tokens | None:
        """None where bytes are read."""
        if tokens.holds_tokens(self.data):
            return tokens.open_tokens(self.data)
        return tokens.tokenise(self._source, self._scan.sha256, self.tokenizer) if self.tokenizer else None

    @cached_property
    def _content(self) -> Content:
        content = self._tokens.ids if self._tokens else self._source
        size, needed = len(content), shortest(self.context)
        if size < needed and self.data is not None:
            raise DataError(
                f"--data {self.data}: {size} {self._unit}s are too few; one window to train on and one to hold out"
                f" take {needed} {self._unit}s at --task-option context={self.context}"
            )
        wanted = f"smaller: it takes {needed} {self._unit}s, the built-in text has {size}"
        check_option("context", self.context, size >= needed, wanted)
        return content

    @property
    def _unit(self) -> str:
        return "token" if self._tokens else "byte"

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, 256 for bytes."""
        return self._tokens.vocab_size if self._tokens else NUM_BYTES

    def layers(self) -> list[Callable[[], nn.Module]]:
        """num_layers + 2 factories: int64 (batch, time <= context) in, scores (batch, time, vocab_size) out."""
        from hpctrain.tasks import gpt

        sizes = self.num_layers, self.width, self.num_heads, self.context
        return gpt.layer_factories(*sizes, self.dropout, self.vocab_size)

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Cross entropy in nats: its sum over all positions, and their number."""
        from hpctrain.tasks import gpt

        return gpt.cross_entropy_sum(outputs, targets), targets.numel()

    def metric(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        """`loss` (nats) and `bits_per_byte` or `bits_per_token`, each as (sum, number of bytes or tokens)."""
        total, count = self.loss(outputs, targets)
        return {"loss": (total.item(), count), f"bits_per_{self._unit}": (total.item() / math.log(2), count)}

    def dataset(self, split: str) -> Windows:
        """Windows of `split` "train" or "eval": (input, target), int64 tensors of shape (context,)."""
        assert split in ("train", "eval"), split
        limit = self._tokens.vocab_size if self._tokens else None
        return Windows(self._content, self.context, split == "eval", limit)

    def baseline(self) -> dict[str, float]:
        """What a table counted on the training windows reaches on the targets of the held-out ones, as `metric` has it.

        It is a table of pairs, of single tokens where the vocabulary has more than 1024.
        """
        table = _pair_table_nats if self.vocab_size <= MAX_PAIRED else _single_table_nats
        nats = table(self.dataset("train"), self.dataset("eval"), self.vocab_size)
        return {"loss": nats, f"bits_per_{self._unit}": nats / math.log(2)}

    def sample(self, forward: Callable[[Tensor], Tensor]) -> str | None:
        """The beginning of the held-out text and 200 bytes or tokens that the model continues it with.

        The same at every call; None where no tokenizer is known that makes text of the tokens.
        `forward` maps int64 (1, time <= context) to scores (1, time, vocab_size).
        """
        path = self._tokens.tokenizer if self._tokens else None
        if self._tokens and not path:
            return None
        from hpctrain.tasks import gpt

        prompt = self._content.read(0, PROMPT_LENGTH).tolist()
        ids = gpt.continue_tokens(forward, prompt, SAMPLE_LENGTH, self.context, TEMPERATURE)
        text = (
            tokens.load_tokenizer(path, f"tokenizer {path}").decode(ids)
            if path
            else bytes(ids).decode(errors="replace")
        )
        return "".join(letter if letter.isprintable() or letter in "\n\t" else UNPRINTABLE for letter in text)

    def data_sha256(self) -> str:
        """Hex digest of all bytes, those of a folder joined in order; with a tokenizer, of them and of its file."""
        return tokens.tokenised_sha256(self._scan.sha256, self.tokenizer) if self.tokenizer else self._scan.sha256

    def data_stamp(self) -> Stamp | None:
        """The present state of the files of --data, another one where they change; None for the built-in text."""
        return None if self.data is None else stamp(self.data)


def _pair_table_nats(train: Windows, held_out: Windows, vocab_size: int) -> float:
    """Mean over the held-out targets.

    A pair's probability is (count + 5 * p(target)) / (sum of counts + 5), p the share of the token with one added
    to each count (a Dirichlet prior; MacKay and Peto, 1995): harder to beat than one added to each pair.
    """
    trained, counts = train.pair_counts(vocab_size), held_out.pair_counts(vocab_size)
    single = (trained.sum(0) + 1) / (trained.sum() + vocab_size)
    share = (trained + UNIGRAM_WEIGHT * single) / (trained.sum(1, keepdims=True) + UNIGRAM_WEIGHT)
    return -float((counts * np.log(share)).sum() / counts.sum())


def _single_table_nats(train: Windows, held_out: Windows, vocab_size: int) -> float:
    """Mean over the held-out targets, each with its share in training, one added to each count."""
    trained, counts = train.target_counts(vocab_size), held_out.target_counts(vocab_size)
    return -float((counts * np.log((trained + 1) / (trained.sum() + vocab_size))).sum() / counts.sum())
