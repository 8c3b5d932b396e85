"""The largest numbers of each bucket only (Aji and Heafield, EMNLP 2017; with memory: Stich et al., NeurIPS 2018).

Every rank chooses its own, and gets those of all others with their places.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch

from hpctrain.model.compressors import Exchange, Gather, Part

ALIGNMENT = 8  # bytes


class TopK:
    """Of each bucket the share `fraction` (above 0, at most 1), rounded up."""

    def __init__(self, fraction: float | Fraction):
        self.fraction = fraction if isinstance(fraction, Fraction) else Fraction(str(fraction))
        if not 0 < self.fraction <= 1:
            raise ValueError(f"TopK: a fraction of {fraction} is not above 0 and at most 1")

    def bucket(
        self, number: int, flat: torch.Tensor, parts: Mapping[str, Part], rank: int, num_ranks: int
    ) -> "TopKBucket":
        return TopKBucket(flat, math.ceil(self.fraction * len(flat)), rank, num_ranks)


class TopKBucket:
    """`count` numbers of this rank in a row of bytes: the values, then their places, ascending."""

    def __init__(self, flat: torch.Tensor, count: int, rank: int, num_ranks: int):
        self._count, self._rank = count, rank
        integer = torch.int32 if len(flat) < 1 << 31 else torch.int64
        values, places = count * flat.itemsize, count * integer.itemsize
        length = max(1, -(-(values + places) // ALIGNMENT)) * ALIGNMENT
        self._message = torch.zeros(num_ranks, length, dtype=torch.uint8)
        self._rows = [(row[:values].view(flat.dtype), row[length - places :].view(integer)) for row in self._message]

    def exchange(self, flat: torch.Tensor, left: torch.Tensor) -> Exchange:
        chosen = largest(left, self._count)
        values, places = self._rows[self._rank]
        values.copy_(left[chosen])
        places.copy_(chosen)
        left[chosen] = 0
        yield Gather(self._message)
        flat.zero_()
        for values, places in self._rows:  # in the order of ranks, so all add up alike
            flat.index_add_(0, places, values)

    def settle(self, applied: bool) -> None:
        """Nothing is kept here."""

    def memory(self) -> Mapping[str, torch.Tensor]:
        return {}


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest magnitudes are, ascending; of equal ones the first. NaN counts as infinity."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    magnitudes = values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    smallest = magnitudes.topk(count, sorted=False).values.min()
    chosen = magnitudes > smallest
    equal = (magnitudes == smallest).nonzero().squeeze(1)
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen.nonzero().squeeze(1)
