"""Buffers of the OSU-style benchmarks: NumPy's, torch's or CuPy's, in huge pages where there are any."""

import importlib.util
import mmap

import figures
import numpy as np

from hpctrain.comm.abort import RankFailed
from hpctrain.comm.cuda_aware import SWITCH, ask, verdict
from hpctrain.plan.devices import choose

KINDS = ("numpy", "torch", "cupy")
PAGE = 2 << 20


def check(kind: str, asked: str) -> None:
    """ValueError, one line, for a library that is not there; `asked` is the flag that wants it."""
    if kind != "numpy" and importlib.util.find_spec(kind) is None:
        raise ValueError(f"{asked}: {kind} is not installed")
    if kind == "cupy":
        import cupy

        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ValueError(f"{asked}: {error}") from None


def check_aware(asked: str, comm) -> None:
    """Refused where MPI takes memory of the host only: it would end by a segmentation fault. Collective."""
    try:
        answer = verdict(ask(comm))
    except ValueError as error:  # what a variable says
        answer = False, str(error)
    refusal = next((why for takes, why in comm.allgather(answer) if not takes), None)
    if refusal:
        raise figures.Refused(
            f"{asked}: this MPI takes memory of the host only ({refusal}; {SWITCH}=1 if you know better); "
            "of sums --algorithm ring and host go through it"
        )


def take_device(rank: int) -> None:
    """Round robin, as ranks that a launcher puts on hosts in blocks find each its own."""
    import cupy

    cupy.cuda.Device(choose(cupy.cuda.runtime.getDeviceCount(), rank)).use()


def pinned(nbytes: int) -> np.ndarray:
    """Memory of the host that the device copies from and to by itself, as float32."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.float32, nbytes // 4)


def finish() -> None:
    """All that the device was told is done."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()


class Buffers:
    """Memory of one rank, allocated once for each name and grown where a size needs it."""

    def __init__(self, kind: str, on_device: bool, dtype):
        self._kind, self._dtype = ("cupy" if on_device else "numpy" if kind == "cupy" else kind), np.dtype(dtype)
        self._memory: dict[str, object] = {}
        self.source = None  # bytes -> memory as uint8, where it is not this rank's alone

    def zeros(self, name: str, nbytes: int):
        """`nbytes` of it, as elements of the test's dtype; one of the library's arrays, all zero."""
        length = nbytes // self._dtype.itemsize
        held = self._memory.get(name)
        if held is None or len(held) < length:
            try:
                held = self._memory[name] = self._new(max(1, length))
            except (MemoryError, OSError) as error:  # of this rank alone: the others do not know
                raise RankFailed(f"--message-size: no memory of {nbytes} bytes: {error}") from None
        held[:length] = 0
        return held[:length]

    def held(self, name: str):
        """As it is now."""
        return self._memory[name]

    def _new(self, length: int):
        if self._kind == "cupy":
            import cupy

            return cupy.zeros(length, self._dtype)
        nbytes = length * self._dtype.itemsize
        array = (self.source or in_huge_pages)(nbytes).view(self._dtype)
        if self._kind == "torch":
            import torch

            return torch.from_numpy(array)
        return array


def in_huge_pages(nbytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    return array[-array.ctypes.data % PAGE :][:nbytes]


def fill(array, values: np.ndarray) -> None:
    """Copies them to where the array lies."""
    if array.__class__.__module__.startswith("torch"):
        values = array.new_tensor(values)
    elif array.__class__.__module__.startswith("cupy"):
        array.set(values)
        return
    array[:] = values


def wrong(array, expected: np.ndarray) -> int:
    """Elements that are not as expected."""
    host = array.get() if hasattr(array, "get") else np.asarray(array)
    return int((host != expected).sum())


def plot(file: str, title: str, column: str, points: list[tuple[int, float]]) -> None:
    """One line, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(*zip(*points), marker=".")
    axes.set(title=title, xlabel="bytes", ylabel=column, yscale="log")
    axes.set_xscale("symlog", base=2)
    figure.savefig(file, dpi=150, bbox_inches="tight")
