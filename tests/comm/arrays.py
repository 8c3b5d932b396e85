"""The arrays that the ring tests sum: made from a seed, the same wherever they are made, between guards.

A dtype is a name; `bfloat16` stands for a torch tensor, whose bits are compared as uint16.
"""

import zlib

import numpy as np

from tests.oracles import ring_sum as oracle

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16"]
FLOATS = ["float64", "float32", "float16", "complex64"]
GUARD = 0xA5
GUARD_ITEMS = 9  # of the array's own size, before and after it: the array itself is not aligned to a cache line


def bits_dtype(dtype: str) -> np.dtype:
    """What NumPy holds for it."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def share(dtype: str, length: int, rank: int, seed: int, kind: str = "random") -> np.ndarray:
    """What `rank` brings: `whole` small whole numbers, exact in any order; `random` all sizes, NaN and infinity."""
    if kind == "whole":
        values = (np.arange(length) * (rank + 1) + seed % 7) % 13
        return _convert(values if dtype.startswith("uint") else values - 6, dtype)
    rng = np.random.default_rng([seed, length, rank, zlib.crc32(dtype.encode())])
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, length, dtype, endpoint=True)
    values = rng.standard_normal(length) * 10.0 ** rng.uniform(-3, 3, length)
    values[rng.random(length) < 0.02] = np.nan
    values[rng.random(length) < 0.02] = np.inf
    values[rng.random(length) < 0.05] = -0.0
    if dtype == "complex64":
        values = values + 1j * rng.standard_normal(length)
    return _convert(values, dtype)


def _convert(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return oracle.float32_to_bfloat16(values.astype(np.float32))
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def expected_sum(dtype: str, shares: list[np.ndarray], kind: str = "random") -> np.ndarray:
    """By the oracle; whole numbers also by a sum in which the order cannot matter."""
    if dtype == "bfloat16":
        return oracle.ring_sum_bfloat16(shares)
    total = oracle.ring_sum(shares)
    if kind == "whole":
        exact = np.complex128 if dtype.startswith("complex") else np.int64
        np.testing.assert_array_equal(total, np.sum(np.array(shares, exact), axis=0).astype(total.dtype))
    return total


def same(got: np.ndarray, wanted: np.ndarray, dtype: str) -> bool:
    """Equal bits, or NaN at the same places."""
    if dtype == "bfloat16":
        got, wanted = oracle.bfloat16_to_float32(got), oracle.bfloat16_to_float32(wanted)
    elif dtype.startswith("complex"):
        got, wanted = (np.ascontiguousarray(array).view(got.real.dtype) for array in (got, wanted))
    if got.shape != wanted.shape:
        return False
    unsigned = f"u{got.dtype.itemsize}"
    equal = np.ascontiguousarray(got).view(unsigned) == np.ascontiguousarray(wanted).view(unsigned)
    return bool(np.all(equal | (np.isnan(got) & np.isnan(wanted) if got.dtype.kind == "f" else False)))


class Guarded:
    """`values` in the middle of memory whose other bytes must stay as they are; `array` is what a caller would pass."""

    def __init__(self, dtype: str, values: np.ndarray):
        self._edge = GUARD_ITEMS * values.dtype.itemsize
        self._memory = np.full(values.nbytes + 2 * self._edge, GUARD, np.uint8)
        self.bits = self._memory[self._edge : self._edge + values.nbytes].view(values.dtype)
        self.bits[:] = values
        self.array = _tensor(self.bits) if dtype == "bfloat16" else self.bits

    def guards_untouched(self) -> bool:
        before, after = self._memory[: self._edge], self._memory[self._memory.size - self._edge :]
        return bool(np.all(before == GUARD) and np.all(after == GUARD))


def _tensor(bits: np.ndarray):
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
