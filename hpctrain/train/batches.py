"""Which rows each micro-batch of each step holds.

The sampler knows seed, epoch and position, and nothing of the layout; the global batch is cut once into
replicas x micro-batches pieces. So every layout trains on the same rows in the same steps.
"""

import hashlib
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.model.structure import tensors_in
from hpctrain.plan.grid import piece_of
from hpctrain.plan.seeds import derive_seed
from hpctrain.train.loader import Reader, Request, read


class MicroBatch(NamedTuple):
    """Inputs and targets, and the micro-batch's number within the global batch."""

    inputs: Any
    targets: Any
    number: int


class GlobalSampler:
    """Rows of a data set in global batches: each epoch in another order, its last batch shorter where rows run out."""

    def __init__(self, num_rows: int, batch_size: int, seed: int):
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.steps_per_epoch = -(-num_rows // batch_size)
        self._order = lru_cache(maxsize=2)(self._order_of)  # one that computes, and one that reads ahead
        self.begin_at(0, 0)

    def begin_at(self, step: int, num_rows: int) -> None:
        """So many rows were gone through before `step`, be it in batches of another size: go on behind them."""
        self._first_step, (self._first_epoch, self._skipped) = step, divmod(num_rows, self.num_rows)
        self._steps_of_first = -(-(self.num_rows - self._skipped) // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """Row numbers of global batch `step` (from 0)."""
        epoch, start = self._place(step)
        return self._order(epoch)[start : start + self.batch_size]

    def num_rows_of(self, step: int) -> int:
        """Rows of global batch `step`, without looking for them."""
        return min(self.batch_size, self.num_rows - self._place(step)[1])

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that `step` belongs to."""
        return self._place(step)[0]

    def _place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and where in its order it begins."""
        step -= self._first_step
        if step < self._steps_of_first:
            return self._first_epoch, self._skipped + step * self.batch_size
        epochs, position = divmod(step - self._steps_of_first, self.steps_per_epoch)
        return self._first_epoch + 1 + epochs, position * self.batch_size

    def _order_of(self, epoch: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "epoch", epoch)))
        return generator.permutation(self.num_rows)


class Batches:
    """The micro-batches of one replica, those of the steps to come read ahead by `num_workers` processes."""

    def __init__(
        self,
        reader: Reader,
        sampler: GlobalSampler,
        replica: int,
        num_replicas: int,
        num_microbatches: int,
        num_workers: int = 0,
    ):
        self.sampler, self.num_microbatches = sampler, num_microbatches
        self.seconds = 0.0  # spent waiting for rows, in all
        self._reader, self._num_workers = reader, num_workers
        self._first, self._pieces = replica * num_microbatches, num_replicas * num_microbatches
        self._places: Iterator[tuple[int, int]] = iter(())  # step and index of what the stream gives next
        self._stream: Iterator | None = None

    def number(self, step: int, index: int) -> int | None:
        """Which of the micro-batches of the global batch this is; None where it has no rows."""
        rows = piece_of(self.sampler.num_rows_of(step), self._pieces, self._first + index)
        return self._first + index if rows else None

    def microbatch(self, step: int, index: int) -> MicroBatch | None:
        """Micro-batch `index` of this replica in `step`; None where the global batch has fewer rows than pieces.

        They are read ahead in ascending order; asking for another one than the next is right, and slow.
        """
        request = self._request(step, index)
        if request is None:
            return None
        began = time.perf_counter()
        inputs, targets = self._ahead(step, index) if self._num_workers else next(read(self._reader, [request]))
        self.seconds += time.perf_counter() - began
        return MicroBatch(inputs, targets, self._first + index)

    def row_sha256(self, row: int) -> str:
        """Digest of one row as the first epoch has it."""
        digest = hashlib.sha256()
        inputs, targets = next(read(self._reader, [Request((row,))]))
        for tensor in (*tensors_in(inputs), *tensors_in(targets)):
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Ends the processes that read ahead."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _ahead(self, step: int, index: int) -> tuple[Any, Any]:
        if self._stream is None or next(self._places) != (step, index):
            self.close()
            self._places = (place for place, _ in self._requests(step, index))
            next(self._places)
            requests = (request for _, request in self._requests(step, index))
            self._stream = read(self._reader, requests, self._num_workers)
        return next(self._stream)

    def _requests(self, step: int, index: int) -> Iterator[tuple[tuple[int, int], Request]]:
        """All that has rows, from (step, index) on."""
        while True:
            for each in range(index, self.num_microbatches):
                request = self._request(step, each)
                if request is not None:
                    yield (step, each), request
            step, index = step + 1, 0

    def _request(self, step: int, index: int) -> Request | None:
        rows = self.sampler.rows(step)
        piece = piece_of(len(rows), self._pieces, self._first + index)
        return Request(tuple(rows[piece.start : piece.stop].tolist()), self.sampler.epoch(step)) if piece else None
