"""Linear algebra whose bits do not depend on the processor nor on the number of threads.

Made of additions, multiplications, divisions and roots of single numbers, each rounded as IEEE 754 has it, in an order
that only the shapes decide. Libraries for matrices choose theirs by processor and threads.
"""

import numpy as np
import torch

BLOCK = 1 << 16  # numbers at a time
DEPENDENT = 1e-6  # what is left of a column, by what it was, where it lies in the span of those before it


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of `matrix`, which has more rows than columns: Gram-Schmidt in float64.

    A column that depends on those before it gives way to one that does not. NaN everywhere for what is not finite.
    """
    columns = np.array(matrix.numpy(), np.float64, order="F")
    if not np.isfinite(columns).all():
        return torch.full_like(matrix, torch.nan)
    for number in range(columns.shape[1]):
        own, done = columns[:, number], columns[:, :number]
        largest = np.abs(own).max()
        if largest > 0:
            own /= largest
        before = _norm(own)
        _project(own, done)
        if _norm(own) <= DEPENDENT * before:
            own[:] = 0
            own[np.argmin(_total(np.square(done.T)))] = 1  # the axis that is furthest from their span
            _project(own, done)
        own /= _norm(own)
        _project(own, done)  # once more, for what was rounded
        own /= _norm(own)
    return torch.from_numpy(columns).to(matrix.dtype)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Makes `out` the product of `left` and `right` transposed, both of few columns."""
    height, rows = max(1, BLOCK // len(right)), right.T.contiguous()
    terms = torch.empty_like(out[:height])
    for start in range(0, len(left), height):
        part = out[start : start + height]
        term, own = terms[: len(part)], left[start : start + height]
        torch.mul(own[:, :1], rows[0], out=part)
        for number in range(1, len(rows)):
            part.add_(torch.mul(own[:, number : number + 1], rows[number], out=term))


def _project(own: np.ndarray, done: np.ndarray) -> None:
    """Takes away from `own` what lies along the columns of `done`, one after the other."""
    for other in done.T:
        own -= _total(own * other) * other


def _norm(vector: np.ndarray) -> float:
    return np.sqrt(_total(np.square(vector)))


def _total(values: np.ndarray) -> np.ndarray:
    """The sum over the first dimension, by halves; changes `values`."""
    length = len(values)
    while length > 1:
        half = (length + 1) // 2
        values[: length - half] += values[half:length]
        length = half
    return values[0] if length else np.zeros(values.shape[1:])
