"""Memory for messages, used again and again: its pages are there already, and they are huge ones where there are any.

A transfer within a node copies page by page, so huge pages make it twice as fast.
"""

import math
import weakref
from functools import partial

import numpy as np
import torch

from hpctrain.comm.buffer import allocate

SMALLEST = 1 << 16  # bytes of a block; smaller messages are copied through MPI's own memory
HUGE_PAGE = 2 << 20
SLAB = 8 << 20  # bytes from which smaller blocks are cut, so that they lie in huge pages too


class MessageMemory:
    """Hands out tensors; when nobody holds one any more, nor a view of it, its block is free for the next."""

    def __init__(self):
        self._free: dict[int, list[np.ndarray]] = {}
        self._held: dict[int, weakref.ref] = {}  # by id of the block

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, contiguous, from a multiple of 64 bytes on."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        if not free:
            slab = max(size, SLAB)
            memory = allocate(slab + HUGE_PAGE)
            free += np.split(memory[-memory.ctypes.data % HUGE_PAGE :][:slab], slab // size)
        block = free.pop()
        array = block[:nbytes]  # the tensor's storage keeps this very array
        self._held[id(block)] = weakref.ref(array, partial(self._give_back, block))
        return torch.from_numpy(array).view(dtype).view(shape)

    def _give_back(self, block: np.ndarray, held: weakref.ref) -> None:
        del self._held[id(block)]
        self._free[len(block)].append(block)
