"""Compressed sums with error feedback, all ranks in one place, in NumPy. Imports nothing of hpctrain.

`gradients[step][rank]` is one bucket. Yields, of each step, the sum that every rank gets and what each rank keeps.
"""

import math
from fractions import Fraction

import numpy as np


def top_k(gradients: list[list[np.ndarray]], fraction: Fraction):
    kept = [np.zeros_like(own) for own in gradients[0]]
    for step in gradients:
        total = np.zeros_like(step[0])
        for rank, own in enumerate(step):
            values = own + kept[rank]
            order = sorted(range(len(values)), key=lambda place: (-abs(float(values[place])), place))
            for place in order[: math.ceil(fraction * len(values))]:
                total[place] += values[place]
                values[place] = 0
            kept[rank] = values
        yield total, kept


def power_sgd(gradients, matrices: list[tuple[slice, tuple[int, int]]], starts: list[np.ndarray]):
    """`matrices` of the bucket by place and shape, `starts` the Q that each begins with; the rest is summed.

    A step in which all ranks have zeros leaves Q as it was.
    """
    kept = [np.zeros_like(own) for own in gradients[0]]
    right = [start.copy() for start in starts]
    for step in gradients:
        values = [own + rest for own, rest in zip(step, kept)]
        total = np.sum(values, axis=0)
        kept = [np.zeros_like(own) for own in step]
        for number, (place, shape) in enumerate(matrices):
            own = [each[place].reshape(shape) for each in values]
            left, _ = np.linalg.qr(sum(each @ right[number] for each in own))
            rights = [each.T @ left for each in own]
            total[place] = (left @ sum(rights).T).reshape(-1)
            if any(each.any() for each in own):
                right[number] = sum(rights)
            for rank, each in enumerate(own):
                kept[rank][place] = (each - left @ rights[rank].T).reshape(-1)
        yield total, kept
