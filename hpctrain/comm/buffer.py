"""The memory that MPI moves and the array library that adds: the one place that knows of either.

An array comes in as it is (NumPy, CuPy, or a torch tensor) and is seen as a flat `Buffer` on the same memory. Of what
is on a device (device_buffer.py) `values` are CuPy's, and what NumPy's functions do here they do there.
Sums are made by the array library, never by MPI: the order is ours, and 16-bit floats are right (MPI has no type for
bfloat16). float16 and bfloat16 are summed in float32, partial sums travel as float32, and each sum is rounded once,
at its owner. torch and CuPy are imported only when one of their arrays arrives.
"""

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpctrain.comm.stream import Device

ALIGNMENT = 64  # bytes: a cache line, and what vectorised kernels want; alignment can change the last bit of a product
SUMMABLE_KINDS = "iufc"
DEVICE_KINDS = ("cuda",)  # of torch's devices, of which the memory travels


def allocate(nbytes: int) -> np.ndarray:
    """`nbytes` of uninitialised memory as uint8, aligned to 64 bytes. NumPy asks for huge pages from 4 MiB up."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset : offset + nbytes]


def quietly() -> Callable[[Callable[[], None]], None]:
    """What calls a function without NumPy's warnings of overflow and the like; not from within itself.

    From NumPy 2 on they are switched in a context, and to enter a prepared one takes a tenth of numpy.errstate's time.
    """
    if not np.__version__.startswith("1."):
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        return context.run

    def call(function: Callable[[], None]) -> None:
        with np.errstate(all="ignore"):
            function()

    return call


class Buffer:
    """A contiguous array as flat memory. Indices count elements. `device`: where that is, None for the host."""

    def __init__(self, values: np.ndarray, dtype: str | None = None, device: "Device | None" = None):
        if device is None:
            values = np.asarray(values)  # a matrix or a record array would not become flat
        self.values, self.device = values.reshape(-1), device
        self.dtype = dtype or values.dtype.str.lstrip("<|=")
        self.itemsize = values.dtype.itemsize
        self._bytes = self.values.view(np.uint8) if self.values.size else np.empty(0, np.uint8)

    def __len__(self):
        return self.values.size

    @property
    def partial(self) -> np.dtype:
        """In which dtype partial sums are kept."""
        return self.values.dtype

    def message(self, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) as the bytes that MPI sends or fills."""
        return self._bytes[start * self.itemsize : stop * self.itemsize]

    def overlaps(self, other: "Buffer") -> bool:
        """Whether both have memory in common."""
        return (self.device is None) == (other.device is None) and np.may_share_memory(self.values, other.values)

    def check_summable(self) -> None:
        if self.values.dtype.kind not in SUMMABLE_KINDS:
            raise ValueError(f"a sum of {self.dtype} has no meaning; give integers, floats or complex numbers")

    def partials(self, allocate: Callable[[int], np.ndarray] = allocate) -> "Buffer":
        """Where the partial sums are: this memory itself, unless they need a wider dtype."""
        return self

    def add(self, start: int, received: np.ndarray) -> None:
        """Adds `received` (in ring order: the travelling sum first) to the elements from `start` on; integers wrap."""
        own = self.values[start : start + received.size]
        with np.errstate(all="ignore"):
            np.add(received, own, out=own)

    def add_up(self, shares: list[np.ndarray], out: np.ndarray, scratch: np.ndarray, divisor: float) -> None:
        """The sum of at least two `shares` in their order, divided, into `out`, which may be the last of them.

        `scratch`: bytes for as many numbers of `partial`. Warnings of overflow are the caller's to silence, also below.
        """
        self.add_partially(shares, out, scratch)
        if divisor != 1:
            out /= divisor

    def add_partially(self, shares: list[np.ndarray], out: np.ndarray, scratch: np.ndarray) -> None:
        """As add_up, not rounded or divided: `out` is of dtype `partial`."""
        if len(shares) > 2:
            total = scratch[: out.nbytes].view(out.dtype)
            np.add(shares[0], shares[1], out=total)
            for share in shares[2:-1]:
                np.add(total, share, out=total)
            np.add(total, shares[-1], out=out)
        else:
            np.add(shares[0], shares[1], out=out)

    def settle(self, partial: np.ndarray, out: np.ndarray, divisor: float) -> None:
        """Rounds and divides a sum of dtype `partial` into `out`; where there is nothing to round, both are one."""
        if divisor != 1:
            out /= divisor

    def finish(self, start: int, stop: int, partials: "Buffer", divisor: float = 1) -> None:
        """Takes over the finished sums [start, stop), divided; nothing to take where they are made in place."""
        if divisor != 1:
            own = self.values[start:stop]
            with np.errstate(all="ignore"):
                own /= divisor


class HalfBuffer(Buffer):
    """float16: summed in float32, rounded once."""

    @property
    def partial(self) -> np.dtype:
        return np.dtype(np.float32)

    def partials(self, allocate: Callable[[int], np.ndarray] = allocate) -> Buffer:
        wide = Buffer(allocate(4 * len(self)).view(np.float32), None, self.device)
        self._widen_into(wide.values)
        return wide

    def _widen_into(self, wide: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            wide[:] = self.values

    def add_up(self, shares: list[np.ndarray], out: np.ndarray, scratch: np.ndarray, divisor: float) -> None:
        total = scratch[: 4 * out.size].view(np.float32)
        self.add_partially(shares, total, scratch)
        self.settle(total, out, divisor)

    def add_partially(self, shares: list[np.ndarray], out: np.ndarray, scratch: np.ndarray) -> None:
        out[:] = shares[0]
        for share in shares[1:]:
            np.add(out, share, out=out)

    def settle(self, partial: np.ndarray, out: np.ndarray, divisor: float) -> None:
        out[:] = partial / np.float32(divisor)

    def finish(self, start: int, stop: int, partials: Buffer, divisor: float = 1) -> None:
        with np.errstate(all="ignore"):
            self.values[start:stop] = partials.values[start:stop] / np.float32(divisor)


class BFloat16Buffer(HalfBuffer):
    """A torch bfloat16 tensor: NumPy has no such dtype, so torch converts and NumPy sees 16-bit patterns."""

    def __init__(self, tensor):
        import torch

        self._torch = torch
        self._tensor = tensor.reshape(-1)
        super().__init__(self._tensor.view(torch.int16).numpy(), "bfloat16")

    def check_summable(self) -> None:
        pass

    def _widen_into(self, wide: np.ndarray) -> None:
        self._torch.from_numpy(wide).copy_(self._tensor)

    def add_partially(self, shares: list[np.ndarray], out: np.ndarray, scratch: np.ndarray) -> None:
        total = self._torch.from_numpy(out)
        total.copy_(self._seen(shares[0]))
        for share in shares[1:]:
            total.add_(self._seen(share))

    def settle(self, partial: np.ndarray, out: np.ndarray, divisor: float) -> None:
        self._seen(out).copy_(self._torch.from_numpy(partial) / divisor)

    def _seen(self, bits: np.ndarray):
        return self._torch.from_numpy(bits).view(self._torch.bfloat16)

    def finish(self, start: int, stop: int, partials: Buffer, divisor: float = 1) -> None:
        self._tensor[start:stop].copy_(self._torch.from_numpy(partials.values[start:stop]) / divisor)


def as_buffer(array) -> Buffer:
    """Sees `array` as flat memory, without a copy; raises ValueError for what cannot be used in place."""
    kind = type(array).__module__.partition(".")[0]
    if kind == "torch" or hasattr(array, "requires_grad"):
        return _of_tensor(array)
    if not isinstance(array, np.ndarray):
        return _of_another_kind(array, kind)
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError("a masked array cannot travel, its mask would be lost; pass numpy.ma.filled(array, 0)")
    if not array.flags.c_contiguous:
        raise ValueError(f"array of shape {array.shape} is not contiguous; pass numpy.ascontiguousarray(array)")
    if not array.flags.writeable:
        raise ValueError(f"array of shape {array.shape} is read-only; pass a copy")
    if array.dtype.hasobject or array.dtype.kind not in SUMMABLE_KINDS + "bVSUmM":
        raise ValueError(f"arrays of {array.dtype} cannot travel; give numbers or bytes")
    if array.dtype.kind == "f" and array.itemsize == 2:
        return HalfBuffer(array)
    return Buffer(array)


def as_host_buffer(array, what: str) -> Buffer:
    """As as_buffer, for `what` takes memory of the host only. ValueError for memory of a device."""
    buffer = as_buffer(array)
    if buffer.device is not None:
        raise ValueError(
            f"{what} takes memory of the host only, and an array on {buffer.device} came; pass a copy of it"
        )
    return buffer


def _of_another_kind(array, kind: str) -> Buffer:
    if isinstance(array, Buffer):
        return array
    if kind != "cupy" or not hasattr(array, "device"):
        raise ValueError(f"expected an array of NumPy or CuPy, or a torch tensor, got {type(array).__name__}")
    from hpctrain.comm.device_buffer import of_cupy

    return of_cupy(array)


def _of_tensor(tensor) -> Buffer:
    import torch

    if tensor.layout != torch.strided:
        raise ValueError(f"a {tensor.layout} tensor cannot travel; pass tensor.to_dense()")
    if not tensor.is_contiguous():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a conjugate or negative view cannot travel; pass tensor.resolve_conj().resolve_neg()")
    if tensor.device.type in DEVICE_KINDS:
        from hpctrain.comm.device_buffer import of_cuda_tensor

        return of_cuda_tensor(tensor.detach())
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} cannot travel; pass tensor.cpu()")
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return BFloat16Buffer(tensor)
    try:
        return as_buffer(tensor.numpy())
    except TypeError:
        raise ValueError(f"a tensor of {tensor.dtype} cannot travel; convert it to a dtype that NumPy knows") from None
