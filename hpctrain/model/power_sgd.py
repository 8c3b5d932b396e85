"""Gradients of matrices as the product of two thin factors (PowerSGD; Vogels et al., NeurIPS 2019).

One step of a power iteration for the sum M of all ranks' matrices, that begins with the Q of the step before:

    P = sum of M_i Q       orthogonalised, the same on all ranks
    Q = sum of M_i^T P     and P Q^T is the nearest matrix to M whose columns P spans

Rank i has sent P (M_i^T P)^T of its M_i; the rest stays with it. Each rank makes P and P Q^T for itself, out of the
same bits and in the same order (fixed_order.py): replicas stay equal whatever processors and threads they have.
"""

from collections.abc import Mapping, Sequence

import torch

from hpctrain.model.compressors import Exchange, Part, Sum
from hpctrain.model.fixed_order import multiply, orthogonal


class PowerSGD:
    """Factors of `rank` columns, for parameters of two dimensions and more, seen as their first one by all others.

    All other gradients, and those whose factors would be no smaller than they are, are summed as they are. `seed`: of
    the first Q, the same on all ranks.
    """

    def __init__(self, rank: int, seed: int = 0):
        if rank < 1:
            raise ValueError(f"PowerSGD: rank {rank} is less than 1")
        self.rank, self.seed = rank, seed

    def bucket(
        self, number: int, flat: torch.Tensor, parts: Mapping[str, Part], rank: int, num_ranks: int
    ) -> "PowerBucket":
        generator = torch.Generator().manual_seed((self.seed << 20) + number)
        matrices, rest = [], []
        for name, (place, shape) in parts.items():
            rows = shape[0] if len(shape) > 1 else 1
            columns = (place.stop - place.start) // rows if rows else 0
            if self.rank * (rows + columns) < rows * columns:
                matrices.append(Matrix(name, place, rows, columns, self.rank, flat.dtype, generator))
            else:
                rest.append(place)
        return PowerBucket(matrices, rest, flat.dtype)


class Matrix:
    """The gradient of parameter `name`: `left`, `right` are this step's factors, `start` the Q to begin with."""

    def __init__(
        self,
        name: str,
        place: slice,
        rows: int,
        columns: int,
        rank: int,
        dtype: torch.dtype,
        generator: torch.Generator,
    ):
        self.name, self.place, self.rows, self.columns, self.rank = name, place, rows, columns, rank
        self.start = torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(dtype)
        self.left = torch.zeros(rows, rank, dtype=dtype)
        self.right = torch.zeros(columns, rank, dtype=dtype)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its numbers in a bucket, as a matrix."""
        return flat[self.place].view(self.rows, self.columns)


class PowerBucket:
    """Two sums for all matrices of a bucket; the first one carries what is not compressed, too."""

    def __init__(self, matrices: Sequence[Matrix], rest: Sequence[slice], dtype: torch.dtype):
        self._matrices, self._rest = matrices, rest
        lefts = [each.rows * each.rank for each in matrices]
        plain = [place.stop - place.start for place in rest]
        self._first = torch.zeros(sum(lefts) + sum(plain), dtype=dtype)
        self._second = torch.zeros(sum(each.columns * each.rank for each in matrices), dtype=dtype)
        pieces = self._first.split([*lefts, *plain])
        self._lefts, self._plain = pieces[: len(lefts)], pieces[len(lefts) :]
        self._rights = self._second.split([each.columns * each.rank for each in matrices])

    def exchange(self, flat: torch.Tensor, left: torch.Tensor) -> Exchange:
        for each, piece in zip(self._matrices, self._lefts):
            torch.mm(each.of(left), each.start, out=piece.view(each.rows, each.rank))
        for place, piece in zip(self._rest, self._plain):
            piece.copy_(left[place])
            left[place] = 0
        yield Sum(self._first)
        for each, piece, other in zip(self._matrices, self._lefts, self._rights):
            each.left = orthogonal(piece.view(each.rows, each.rank))
            own = torch.mm(each.of(left).T, each.left, out=other.view(each.columns, each.rank))
            each.of(left).addmm_(each.left, own.T, alpha=-1)
        if self._matrices:
            yield Sum(self._second)
        for each, other in zip(self._matrices, self._rights):
            each.right.copy_(other.view(each.columns, each.rank))
            multiply(each.left, each.right, each.of(flat))
        for place, piece in zip(self._rest, self._plain):
            flat[place] = piece

    def settle(self, applied: bool) -> None:
        """Q goes on from here, or begins the next step as it began this one."""
        for each in self._matrices:
            if applied and each.right.any():  # of a sum of zeros nothing is learnt
                each.start, each.right = each.right, each.start

    def memory(self) -> Mapping[str, torch.Tensor]:
        """The Q to begin with."""
        return {each.name: each.start for each in self._matrices}
