"""Which rows a rank reads in a loop of its own: the order depends on seed and epoch, never on the number of ranks.

Rank r of n takes positions r, r + n, r + 2n, ... of the epoch's order. So n ranks with batches of b rows read in step k
exactly the rows that one process with batches of n * b rows reads in step k.
"""

import operator

import numpy as np
import torch.utils.data

from hpctrain.comm.mesh import Mesh
from hpctrain.plan.seeds import derive_seed

POLICIES = ("drop", "keep")


class Sampler(torch.utils.data.Sampler):
    """This rank's row numbers, epoch after epoch; give it to a DataLoader as `sampler`.

    `data` is a data set with a length, or a number of rows. Each iteration is the next epoch, with an order of its own
    (without `shuffle`: ascending, always), so iterate equally often on all ranks. `epoch` is the number of the next
    one, from 0; set it to resume. Where rows do not divide by the ranks, `uneven` decides:

    * "drop": the last rows of this epoch's order, fewer than there are ranks, are left out; all ranks have equally
      many. Another epoch leaves out others. For training.
    * "keep": every row comes exactly once; the first ranks may have one row more. For evaluation, or with
      `DataParallel.join`.

    Raises ValueError for another policy, data without a length, a number of rows or a seed that is no integer, rows
    less than none, or fewer than ranks with "drop".
    """

    def __init__(self, data, mesh: Mesh, seed: int = 0, shuffle: bool = True, uneven: str = "drop"):
        if uneven not in POLICIES:
            raise ValueError(f"uneven={uneven!r}: it is {' or '.join(map(repr, POLICIES))}")
        self._num_rows = _count_rows(data)
        self._rank, self._size = mesh.data.rank, mesh.data.size
        if uneven == "drop" and self._num_rows < self._size:
            raise ValueError(
                f"Sampler: {self._num_rows} rows for {self._size} ranks leave none to any of them; "
                "start fewer ranks, or uneven='keep'"
            )
        self.seed, self.shuffle, self.uneven, self.epoch = _integer(seed), shuffle, uneven, 0

    def __len__(self) -> int:
        """This rank's rows in an epoch."""
        return len(range(self._rank, self._num_used, self._size))

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter(self._order(epoch)[self._rank : self._num_used : self._size].tolist())

    @property
    def _num_used(self) -> int:
        return self._num_rows - (self._num_rows % self._size if self.uneven == "drop" else 0)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self._num_rows)
        generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "epoch", epoch)))
        return generator.permutation(self._num_rows)


def _count_rows(data) -> int:
    if hasattr(data, "__len__") and getattr(data, "shape", None) != ():  # arrays without dimensions have no length
        return len(data)
    try:
        num_rows = operator.index(data)
    except TypeError:
        what = f"{data!r} is no integer" if isinstance(data, float) else f"{type(data).__name__} has no length"
        raise ValueError(f"Sampler: {what}; give a map-style data set or a number of rows") from None
    if num_rows < 0:
        raise ValueError(f"Sampler: {num_rows} rows are less than none; give a map-style data set or a number of rows")
    return num_rows


def _integer(seed) -> int:
    try:
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"Sampler: seed={seed!r} is no integer") from None
