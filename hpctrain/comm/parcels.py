"""Tensors between their memory and MPI, for what is sent from one rank to another: Parcel leaves, Arrival comes.

On the host MPI reads and writes the tensor itself. On a device (stream.py has the rule) a tensor lies in memory of
torch's pool, which MPI may not map, and may be computed yet. So it is copied, on the stream of calls, to plain memory
of the device, which MPI takes (direct), or to pinned memory of the host (staged), and leaves from there, whole. What
comes is handed out in plain memory of the device, which it comes to directly, or by a copy when it has arrived.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpctrain.comm.buffer import allocate, as_buffer
from hpctrain.comm.device_buffer import allocator
from hpctrain.comm.progress import wait_until

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.buffer import Buffer


class Parcel:
    """A contiguous tensor of the host on its way out."""

    path = "host"

    def __init__(self, tensor: torch.Tensor, buffer: Buffer):
        self._tensor, self.message = tensor, buffer.message(0, len(buffer))
        self.began, self.request = time.perf_counter(), None

    def poll(self) -> bool:
        """Whether MPI may read the message."""
        return True

    def release(self) -> None:
        """MPI has read it."""


class DeviceParcel(Parcel):
    """Of a device: a copy of the tensor as it is when all has been done that the caller's stream was told so far."""

    def __init__(self, tensor: torch.Tensor, buffer: Buffer, is_direct: bool):
        super().__init__(tensor, buffer)
        self.path = "direct" if is_direct else "staged"
        self._device, self._source = buffer.device, self.message
        self._pool = self._device.memory if is_direct else self._device.pinned
        self._lent = self._pool.lend(self._source.size)
        self.message = self._lent[: self._source.size]
        self._produced, self._copied = self._device.produced(), None

    def poll(self) -> bool:
        if self._copied is None:
            if not self._produced.done:
                return False
            self._copy()
            self._copied = self._device.mark()
        if not self._copied.done:
            return False
        self._tensor = self._source = None
        return True

    def _copy(self) -> None:
        if self.path == "staged":
            self._device.to_host(self._source, self.message)
        elif self.message.size:
            with self._device.work():
                self.message[:] = self._source

    def release(self) -> None:
        self._pool.take_back(self._lent)


def parcel_of(tensor: torch.Tensor, takes_device_memory: Callable[[], bool]) -> Parcel:
    """`takes_device_memory()` says whether MPI does, and is asked where there is a device."""
    if tensor.device.type == "cpu":
        return Parcel(tensor, as_buffer(tensor))
    return DeviceParcel(tensor, as_buffer(as_bytes(tensor)), takes_device_memory())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whatever numbers are in it."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def dtype_name(tensor: torch.Tensor) -> str:
    """Which torch has an attribute of."""
    return str(tensor.dtype).removeprefix("torch.")


class Arrival:
    """A tensor that is to come, into memory of the host."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        buffer = as_buffer(tensor)
        self.message, self.request = buffer.message(0, len(buffer)), None

    def poll(self) -> bool:
        """Whether it is there for everybody."""
        return self.request.Test()

    def release(self) -> None:
        """Nothing of it is under way any more."""

    def give_up(self) -> None:
        """Nobody takes it; what is under way may have come before that was said."""
        self.release()


class DirectArrival(Arrival):
    """Into plain memory of a device, which MPI writes to."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__(as_bytes(tensor))
        self.tensor = tensor


class StagedArrival(Arrival):
    """Into pinned memory of the host, and from there to the device."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.request = tensor, None
        buffer = as_buffer(as_bytes(tensor))
        self._device, self._target = buffer.device, buffer.message(0, len(buffer))
        self._lent = self._device.pinned.lend(self._target.size)
        self.message = self._lent[: self._target.size]
        self._is_here, self._copied = False, None

    def poll(self) -> bool:
        if self._copied is None:
            if not self.request.Test():
                return False
            self._device.to_device(self.message, self._target)
            self._copied = self._device.mark()
        return self._copied.done

    def release(self) -> None:
        self._device.pinned.take_back(self._lent)

    def give_up(self) -> None:
        if self._copied is not None:
            wait_until(lambda: self._copied.done)
        self.release()


class Memory:
    """Of tensors that come: used again when nobody reads them any more, a device included.

    `home`: the device of torch to which comes what left one; None: all comes to the host. `takes_device_memory()` says
    whether MPI does, and is asked where there is a device.
    """

    def __init__(self, home: torch.device | None, takes_device_memory: Callable[[], bool]):
        self.home, self._takes_device_memory = home, takes_device_memory
        self._pool: dict[tuple, list] = {}
        self._read: deque[tuple[Any, tuple, torch.Tensor]] = deque()  # released, and read until an event has passed
        self._wanted: set[tuple] = set()  # dtype, shape and whether it is on the device: what is kept

    def want(self, wanted: set[tuple]) -> None:
        """Memory of these is kept from now on; of those before as long as it lasts."""
        kept, self._wanted = self._wanted | wanted, wanted
        self._pool = {key: free for key, free in self._pool.items() if key in kept}

    def arrival(self, key: tuple) -> Arrival:
        tensor = self._take(key)
        if not key[2]:
            return Arrival(tensor)
        return (DirectArrival if self._takes_device_memory() else StagedArrival)(tensor)

    def release(self, tensor: torch.Tensor) -> None:
        """Nobody is told to read it any more; a device may do so yet, which was told before."""
        is_there = tensor.device.type != "cpu"
        key = (dtype_name(tensor), tuple(tensor.shape), is_there)
        if key not in self._wanted:
            return
        if is_there:
            self._read.append((as_buffer(as_bytes(tensor)).device.produced(), key, tensor))
        else:
            self._pool.setdefault(key, []).append(tensor)

    def _take(self, key: tuple) -> torch.Tensor:
        import torch

        while self._read and self._read[0][0].done:
            _, released, tensor = self._read.popleft()
            if released in self._wanted:
                self._pool.setdefault(released, []).append(tensor)
        if free := self._pool.get(key):
            return free.pop()
        dtype, shape, is_there = key
        kind = getattr(torch, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        memory = (allocator(self.home) if is_there else allocate)(nbytes)
        return torch.as_tensor(memory).view(kind).view(shape)
