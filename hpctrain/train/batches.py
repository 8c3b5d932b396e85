"""Which rows each micro-batch of each step holds.

The sampler knows seed, epoch and position, and nothing of the layout; the global batch is cut once into
replicas x micro-batches pieces. So every layout trains on the same rows in the same steps.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from hpctrain.plan.grid import split_evenly
from hpctrain.plan.seeds import derive_seed


class MicroBatch(NamedTuple):
    """Inputs and targets, and the micro-batch's number within the global batch."""

    inputs: torch.Tensor
    targets: torch.Tensor
    number: int


class Sampler:
    """Rows of a data set in global batches: each epoch in another order, its last batch shorter where rows run out."""

    def __init__(self, num_rows: int, batch_size: int, seed: int):
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.steps_per_epoch = -(-num_rows // batch_size)
        self._epoch, self._order = None, None

    def rows(self, step: int) -> np.ndarray:
        """Row numbers of global batch `step` (from 0)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "epoch", epoch)))
            self._epoch, self._order = epoch, generator.permutation(self.num_rows)
        return self._order[position * self.batch_size : (position + 1) * self.batch_size]


class Batches:
    """The micro-batches of one replica, read from a map-style `dataset`.

    Floating-point inputs and targets are cast to `dtype`, that of the model.
    """

    def __init__(self, dataset, sampler: Sampler, replica: int, num_replicas: int, num_microbatches: int, dtype):
        self.sampler, self.num_microbatches, self.dtype = sampler, num_microbatches, dtype
        self._dataset = dataset
        self._first, self._pieces = replica * num_microbatches, num_replicas * num_microbatches

    def microbatch(self, step: int, index: int) -> MicroBatch | None:
        """Micro-batch `index` of this replica in `step`; None where the global batch has fewer rows than pieces."""
        number = self._first + index
        rows = self.sampler.rows(step)
        piece = split_evenly(len(rows), self._pieces)[number]
        if not piece:
            return None
        return MicroBatch(*read_rows(self._dataset, rows[piece.start : piece.stop], self.dtype), number)


def read_rows(dataset, rows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the `rows` of a map-style data set, stacked; floating-point tensors in `dtype`."""
    inputs, targets = default_collate([dataset[int(row)] for row in rows])
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in (inputs, targets))
