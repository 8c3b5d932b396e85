"""Arrays whose memory is on a device, seen as flat buffers without a copy: CuPy's arrays, and torch's CUDA tensors.

CuPy adds them: NumPy's functions pass its arrays on to it, so sums on a device are the same code as sums on the host.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.bfloat16 import HALF, QUIET_NAN
from hpctrain.comm.buffer import SUMMABLE_KINDS, Buffer, HalfBuffer, allocate
from hpctrain.comm.stream import Device, cupy_device, torch_device

if TYPE_CHECKING:
    import torch


class DeviceBFloat16Buffer(HalfBuffer):
    """bfloat16 as its bits (uint16): no array library knows it, and torch works on streams of its own."""

    def __init__(self, bits, device: Device):
        super().__init__(bits, "bfloat16", device)

    def check_summable(self) -> None:
        pass

    def _widen_into(self, wide) -> None:
        words = wide.view(np.uint32)
        words[:] = self.values
        np.left_shift(words, 16, out=words)

    def finish(self, start: int, stop: int, partials: Buffer, divisor: float = 1) -> None:
        total = partials.values[start:stop] / np.float32(divisor)
        words = total.view(np.uint32)
        rounded = (words + (((words >> np.uint32(16)) & np.uint32(1)) + np.uint32(HALF))) >> np.uint32(16)
        rounded[np.isnan(total)] = QUIET_NAN
        self.values[start:stop] = rounded


def see(values, device: Device, dtype: str | None = None) -> Buffer:
    """`values`, an array of the device's library, as flat memory; `dtype` "bfloat16" where these are its bits."""
    if not values.flags.c_contiguous:
        raise ValueError(f"array of shape {values.shape} on {device} is not contiguous; pass a contiguous copy")
    if values.dtype.kind not in SUMMABLE_KINDS + "b":
        raise ValueError(f"arrays of {values.dtype} cannot travel from {device}; give numbers")
    if dtype == "bfloat16":
        return DeviceBFloat16Buffer(values, device)
    if values.dtype.kind == "f" and values.dtype.itemsize == 2:
        return HalfBuffer(values, None, device)
    return Buffer(values, None, device)


def of_cupy(array) -> Buffer:
    """An array of CuPy, on whichever device it is."""
    return see(array, cupy_device(array.device.id))


def of_cuda_tensor(tensor) -> Buffer:
    """A contiguous CUDA tensor without a graph, seen as CuPy's array on its memory."""
    import torch

    try:
        import cupy
    except ImportError:
        raise ValueError(
            f"a tensor on {tensor.device} needs CuPy, which adds on devices: install cupy-cuda12x (or that of your "
            "CUDA), or pass tensor.cpu()"
        ) from None
    is_bfloat16 = tensor.dtype == torch.bfloat16
    with cupy.cuda.Device(tensor.device.index):
        try:
            values = _seen(tensor.view(torch.int16) if is_bfloat16 else tensor)
        except TypeError:
            raise ValueError(f"a tensor of {tensor.dtype} cannot travel; convert it to a dtype CuPy knows") from None
    device = torch_device(tensor.device.index)
    return see(values.view(np.uint16), device, "bfloat16") if is_bfloat16 else see(values, device)


def _seen(tensor):
    """CuPy's array on the memory of a tensor; of none at all where that is empty, for it has no address then."""
    import cupy

    if not tensor.numel():
        return cupy.empty(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return cupy.asarray(tensor)


def allocator(device: "torch.device") -> Callable:
    """What gives `nbytes` of uninitialised memory on `device` as uint8: an array on the host, elsewhere a tensor."""
    return allocate if device.type == "cpu" else partial(_allocate_there, device)


def _allocate_there(device: "torch.device", nbytes: int) -> "torch.Tensor":
    """Memory that MPI may map; torch's own where there is no CuPy, and so nothing travels."""
    import torch

    try:
        memory = torch_device(device.index).allocate(nbytes) if nbytes else None
    except ImportError:
        memory = None
    if memory is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.as_tensor(memory, device=device)
