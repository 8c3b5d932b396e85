"""The sum that a ring all-reduce must give, computed serially and in plain sight. Imports nothing of hpctrain.

n shares of one length are cut into n chunks, the first length % n of them one element longer. Chunk c is summed in the
order in which it travels: ((share[c+1] + share[c+2]) + share[c+3]) ... + share[c]. 16-bit floats are summed in float32
and rounded once. bfloat16, which NumPy lacks, is given and returned as its bits in uint16.
"""

import numpy as np


def chunk_slices(length: int, num_ranks: int) -> list[slice]:
    """Which elements belong to which rank."""
    slices, start = [], 0
    for rank in range(num_ranks):
        stop = start + length // num_ranks + (1 if rank < length % num_ranks else 0)
        slices.append(slice(start, stop))
        start = stop
    return slices


def ring_sum(shares: list[np.ndarray]) -> np.ndarray:
    """The sum of 1-d shares, one a rank; integers wrap."""
    half = shares[0].dtype.kind == "f" and shares[0].dtype.itemsize == 2
    result = np.empty_like(shares[0])
    with np.errstate(all="ignore"):
        for chunk, where in enumerate(chunk_slices(len(result), len(shares))):
            order = [(chunk + 1 + step) % len(shares) for step in range(len(shares))]
            pieces = [shares[rank][where].astype(np.float32) if half else shares[rank][where] for rank in order]
            total = pieces[0]
            for piece in pieces[1:]:
                total = total + piece
            result[where] = total
    return result


def ring_sum_bfloat16(shares: list[np.ndarray]) -> np.ndarray:
    """The same for bfloat16 numbers given as uint16 bits; returns bits. One rank alone keeps its own."""
    if len(shares) == 1:
        return shares[0].copy()
    wide = ring_sum([bfloat16_to_float32(bits) for bits in shares])
    return float32_to_bfloat16(wide)


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, ties to even; every NaN becomes a quiet one."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
