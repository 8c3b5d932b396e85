"""Calls that sum in memory of the host, for an array on a device: it is copied there, summed, and copied back.

So the bits are those that the host makes. Where whole arrays need not be on the host the ring sums on the device itself
(device_collective.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.comm.buffer import Buffer, as_buffer
from hpctrain.comm.call import Call

if TYPE_CHECKING:
    from hpctrain.comm.ring import Ring


def on_host(ring: Ring, array, name: str, build: Callable[[Any], Call]) -> Call:
    """`build(array)`, which sums on the host, for an array wherever it is."""
    buffer = as_buffer(array)
    return build(array) if buffer.device is None else ThroughHost(ring, buffer, name, build)


class ThroughHost(Call):
    """`build` gives the call for an array of the host like `native`, which stands in pinned memory until `release`."""

    def __init__(self, ring: Ring, native: Buffer, name: str, build: Callable[[Any], Call]):
        super().__init__(ring, name)
        self.native, self._device = native, native.device
        self._there = native.message(0, len(native))
        self._lent = self._device.pinned.lend(self._there.size)
        self._here = self._lent[: self._there.size]
        self._inner = build(_numbers(self._here, native.dtype))
        self._copied: Any = None

    @property
    def algorithm(self) -> str:
        return self._inner.algorithm

    @property
    def wire(self) -> str:
        return self._inner.wire

    def start(self) -> ThroughHost:
        """Begins; returns self, when the device has come to where the array is and it is on the host.

        All ranks must start the same calls in the same order, so none may begin before that.
        """
        self._begin()
        produced = self._device.produced()
        self._ring.progress.wait(lambda: produced.done)
        self._device.to_host(self._there, self._here)
        fetched = self._device.mark()
        self._ring.progress.wait(lambda: fetched.done)
        self._copied, self._inner.divisor = None, self.divisor
        self._inner.start()
        self._enlist()
        return self

    def poll(self) -> bool:
        if self.done:
            return self._is_over()
        if self._copied is None:
            if not self._inner.poll():
                return False
            self._device.to_device(self._here, self._there)
            self._copied = self._device.mark()
        if self._copied.done:
            self._leave()
        return self.done

    def abandon(self) -> None:
        """What is posted is the inner call's."""

    def release(self) -> None:
        self._inner.release()
        self._device.pinned.take_back(self._lent)


def _numbers(memory: np.ndarray, dtype: str) -> Any:
    """The bytes as an array of the host; of bfloat16, which only torch knows there, a tensor."""
    if dtype != "bfloat16":
        return memory.view(dtype)
    import torch

    return torch.from_numpy(memory).view(torch.bfloat16)
