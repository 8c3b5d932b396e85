"""What compresses the sums of gradients, bucket by bucket, and remembers what it did not send.

A compressor is any object with a method `bucket`, which says what it does with one bucket of gradients, as a
BucketCompressor. An exchange is a generator: it yields what it wants of the other ranks, a Sum or a Gather, and goes on
when that is there. So a compressor knows nothing of messages, and several exchanges go on side by side.

What is not sent is not lost (error feedback; Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): each rank
adds it to its gradient of the next step.
"""

from collections.abc import Generator, Mapping
from typing import NamedTuple, Protocol

import torch


class Part(NamedTuple):
    """The gradient of one parameter: where it lies in a bucket, in one dimension, and the parameter's shape."""

    place: slice
    shape: torch.Size


class Sum(NamedTuple):
    """Wants the sum of `array` over all ranks in its place."""

    array: torch.Tensor


class Gather(NamedTuple):
    """Wants the rows of all ranks in `array`, (ranks, ...), of which this rank has filled its own."""

    array: torch.Tensor


Exchange = Generator[Sum | Gather, None, None]


class BucketCompressor(Protocol):
    """Keeps its arrays: to yield the same ones in each step saves time."""

    def exchange(self, flat: torch.Tensor, left: torch.Tensor) -> Exchange:
        """Replaces `flat` by the sum over all ranks, or what comes near, the same bits on all ranks.

        Both hold this rank's numbers: gradient, and what was not sent before. From `left` it takes away what it sends.
        """
        ...

    def settle(self, applied: bool) -> None:
        """The exchange is over; not `applied`: the step was skipped, and everything should be as before it."""
        ...

    def memory(self) -> Mapping[str, torch.Tensor]:
        """By parameter, between two steps: what the next one begins with, the same on all ranks. It is saved in
        checkpoints, and what was saved is copied into it. One without this method has nothing to keep.
        """
        ...


class Compressor(Protocol):
    """`number` is that of the bucket, `parts` are by the name of the parameter; all ranks ask for the same."""

    def bucket(
        self, number: int, flat: torch.Tensor, parts: Mapping[str, Part], rank: int, num_ranks: int
    ) -> BucketCompressor: ...
