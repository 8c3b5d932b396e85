"""Work on a device, and the one rule about it: nobody goes on before the stream has come to where he needs it.

A device does what it is told later, stream by stream; MPI, and the host, know nothing of streams. So a call

- leaves an array alone until the stream on which its caller computed it has come to an event recorded at `start`;
- works on a stream of its own, where everything is done in the order in which it was told;
- gives memory to MPI, or takes it back for other use, when an event recorded behind the last work on it has passed;
- is done when the event behind its last work has passed: then every stream sees the result.

Events are asked for, never waited for: whoever waits polls, as for messages, and the device never stands still for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np


class Pool:
    """Memory that is used again and again: to allocate it takes long, and to free it stops the whole device."""

    def __init__(self, allocate: Callable[[int], Any]):
        self._allocate = allocate
        self._free: dict[int, list] = defaultdict(list)

    def lend(self, nbytes: int):
        """At least `nbytes`, as uint8."""
        size = 1 << max(nbytes - 1, 0).bit_length()
        free = self._free[size]
        return free.pop() if free else self._allocate(size)

    def take_back(self, memory) -> None:
        """No work on it is left."""
        self._free[memory.size].append(memory)


class Device:
    """Device `number` as `library` sees it, which is CuPy, or has of CuPy what is used here.

    `current()` gives the stream on which its caller computes, by default the library's. `memory` lends memory of the
    device, `pinned` memory of the host that the device copies from and to meanwhile (NumPy arrays).
    """

    def __init__(self, library, number: int = 0, current: Callable[[], Any] | None = None):
        self._library, self._number = library, number
        self._current = current or library.cuda.get_current_stream
        with self._on_device():
            self._stream = library.cuda.Stream(non_blocking=True)
        self.memory, self.pinned = Pool(self.allocate), Pool(self._allocate_pinned)

    def __str__(self):
        return f"cuda:{self._number}"

    @contextmanager
    def work(self):
        """What the library is told within is done on the stream of calls."""
        with self._on_device(), self._stream:
            yield

    def produced(self):
        """An event, which is `done` when all has been done that the caller has told the device so far."""
        with self._on_device():
            return self._event(self._current())

    def mark(self):
        """An event, which is `done` when the stream of calls has come to here."""
        with self._on_device():
            return self._event(self._stream)

    def to_host(self, source, target: np.ndarray) -> None:
        """Copies bytes of the device into pinned memory, on the stream of calls."""
        if target.size:
            source.get(stream=self._stream, out=target, blocking=False)

    def to_device(self, source: np.ndarray, target) -> None:
        """Copies bytes of pinned memory to the device, on the stream of calls."""
        if source.size:
            target.set(source, stream=self._stream)

    def _on_device(self):
        """Streams, events and memory belong to the device that is current when they are made."""
        return self._library.cuda.Device(self._number)

    def _event(self, stream):
        event = self._library.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def allocate(self, nbytes: int):
        """Uninitialised memory of the device, as uint8.

        Not from the library's pool: what stands in a stream's order, or lies in one large block, MPI may not map.
        """
        cuda = self._library.cuda
        with self._on_device():
            return self._library.ndarray((nbytes,), np.uint8, cuda.MemoryPointer(cuda.Memory(nbytes), 0))

    def _allocate_pinned(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self._library.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


@cache
def cupy_device(number: int) -> Device:
    """For arrays of CuPy."""
    import cupy

    return Device(cupy, number)


@cache
def torch_device(number: int) -> Device:
    """For tensors of torch, which has streams of its own. ImportError where there is no CuPy."""
    import cupy
    import torch

    def current():
        return cupy.cuda.ExternalStream(torch.cuda.current_stream(number).cuda_stream)

    return Device(cupy, number, current)
