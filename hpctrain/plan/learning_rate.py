"""The learning rate of each step: a warm-up, then a course to the end. A function of numbers, the same on every rank.

constant  ----      linear  \\          cosine  \\_        (Loshchilov and Hutter, SGDR, ICLR 2017,
         /                 / \\               /   \\         without restarts)
"""

import math


def learning_rate(
    step: int, num_steps: int, peak: float, schedule: str = "constant", warmup_steps: int = 0, lowest: float = 0.0
) -> float:
    """Of step `step` (from 0) of `num_steps`. It rises in equal parts to `peak`, which the last warm-up step has.

    `linear` and `cosine` fall from `peak` in the first step after the warm-up to `lowest` in the last step; a single
    step after the warm-up has `peak`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    last = max(1, num_steps - 1 - warmup_steps)
    done = min(1.0, (step - warmup_steps) / last)
    share = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return lowest + (peak - lowest) * share
