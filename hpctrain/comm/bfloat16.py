"""Floats of 32 and 64 bits as bfloat16 and back: the upper half of a float32, rounded to nearest, ties to even.

A float64 becomes a float32 first, as torch casts: what float32 cannot hold becomes infinite. What is rounded beyond the
largest bfloat16 (3.39e38) becomes infinite too. Every NaN stays one: rounded as a number, some would end as infinity,
and some as zero.

torch rounds six times as fast as NumPy can (32-bit floats, one core), so it does so wherever it is loaded already.
"""

import sys

import numpy as np

BLOCK = 65536  # numbers at a time, so that what is between two operations stays in the cache
QUIET_NAN = 0x7FC0
HALF = 0x7FFF  # just less than half of what the last of 16 bits stands for


class BFloat16:
    """Converts arrays of any length, in one dimension, and allocates nothing; `bits` are uint16."""

    def __init__(self):
        self._words = np.empty(BLOCK, np.uint32)
        self._wide = np.empty(BLOCK, np.float32)
        self._are_nan = np.empty(BLOCK, np.bool_)

    def round(self, values: np.ndarray, bits: np.ndarray) -> None:
        """`bits` become those of the bfloat16 nearest to each of `values`."""
        with np.errstate(all="ignore"):
            for start in range(0, len(values), BLOCK):
                self._round(values[start : start + BLOCK], bits[start : start + BLOCK])

    def widen(self, bits: np.ndarray, values: np.ndarray) -> None:
        """`values` become what `bits` stand for, exactly."""
        for start in range(0, len(values), BLOCK):
            np.copyto(values[start : start + BLOCK], self._widened(bits[start : start + BLOCK]))

    def add(self, bits: np.ndarray, values: np.ndarray) -> None:
        """Adds what `bits` stand for to `values`, in their dtype."""
        with np.errstate(all="ignore"):
            for start in range(0, len(values), BLOCK):
                own = values[start : start + BLOCK]
                np.add(self._widened(bits[start : start + BLOCK]), own, out=own)

    def keep(self, values: np.ndarray, bits: np.ndarray) -> None:
        """As `round`; `values` become what was rounded."""
        self.round(values, bits)
        self.widen(bits, values)

    def _round(self, values: np.ndarray, bits: np.ndarray) -> None:
        rounded, are_nan = self._words[: len(values)], self._are_nan[: len(values)]
        if values.dtype != np.float32:
            wide = self._wide[: len(values)]
            np.copyto(wide, values, casting="same_kind")
            values = wide
        words = values.view(np.uint32)
        np.right_shift(words, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, HALF, out=rounded)
        np.add(rounded, words, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(bits, rounded, casting="same_kind")
        if np.isnan(values, out=are_nan).any():
            np.copyto(bits, QUIET_NAN, where=are_nan)

    def _widened(self, bits: np.ndarray) -> np.ndarray:
        words = self._words[: len(bits)]
        np.copyto(words, bits)
        np.left_shift(words, 16, out=words)
        return words.view(np.float32)


class TorchBFloat16(BFloat16):
    """The same numbers, converted by torch."""

    def __init__(self, torch):
        super().__init__()
        self._torch = torch

    def round(self, values: np.ndarray, bits: np.ndarray) -> None:
        self._seen(bits).copy_(self._torch.from_numpy(values))

    def widen(self, bits: np.ndarray, values: np.ndarray) -> None:
        self._torch.from_numpy(values).copy_(self._seen(bits))

    def _seen(self, bits: np.ndarray):
        return self._torch.from_numpy(bits.view(np.int16)).view(self._torch.bfloat16)


def converter() -> BFloat16:
    """By torch, where it is loaded."""
    torch = sys.modules.get("torch")
    return BFloat16() if torch is None else TorchBFloat16(torch)
