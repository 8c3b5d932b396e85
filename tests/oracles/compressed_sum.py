"""The sums whose messages carry bfloat16, all ranks' numbers in one place. Imports nothing of hpctrain.

Shares are float32 or float64, one a rank. Whatever goes from one rank to another is rounded, by way of float32; what a
rank adds up it adds up in the dtype of the shares. A mean is divided before its last rounding along the ring, and after
it by doubling.
"""

import numpy as np

from tests.oracles.ring_sum import bfloat16_to_float32, chunk_slices, float32_to_bfloat16


def sent(values: np.ndarray) -> np.ndarray:
    """What arrives of them."""
    return bfloat16_to_float32(float32_to_bfloat16(values.astype(np.float32))).astype(values.dtype)


def compressed_ring(shares: list[np.ndarray], divisor: int = 1) -> np.ndarray:
    """What all ranks hold in the end; one rank alone keeps its own."""
    if len(shares) == 1:
        return shares[0]
    result = np.empty_like(shares[0])
    with np.errstate(all="ignore"):
        for owner, where in enumerate(chunk_slices(len(result), len(shares))):
            order = [(owner + 1 + step) % len(shares) for step in range(len(shares))]
            total = shares[order[0]][where]
            for rank in order[1:]:
                total = sent(total) + shares[rank][where]
            result[where] = sent(total / np.asarray(divisor, total.dtype))
    return result


def compressed_doubling(shares: list[np.ndarray], divisor: int = 1) -> np.ndarray:
    """What all ranks hold in the end."""
    num_ranks, held = len(shares), [share.copy() for share in shares]
    power = 1
    while 2 * power <= num_ranks:
        power *= 2
    with np.errstate(all="ignore"):
        for beyond in range(power, num_ranks):
            held[beyond - power] = held[beyond - power] + sent(held[beyond])
        distance = 1
        while distance < power:
            held = [sent(held[rank]) + sent(held[rank ^ distance]) for rank in range(power)]
            distance *= 2
        total = held[0] if power == num_ranks else sent(held[0])
        return total / np.asarray(divisor, total.dtype)
