"""The ring all-reduce as users call it: an array in, its sum or mean over the ranks out, in the same memory.

A mean is the sum, divided once on each rank: the division comes after the exchange and is the same operation on the
same bits everywhere, so ranks stay equal. The mean of floats of 16 bits is summed and divided in
float32 and rounded once: their sum may be infinite where their mean is not.
"""

import numpy as np

from hpctrain.comm.buffer import as_buffer
from hpctrain.comm.mesh import Mesh

REDUCTIONS = ("sum", "mean")


class AllReduce:
    """Replaces arrays by their sum or mean over the replicas of `mesh`, the same bits on every rank.

        mean = AllReduce(mesh, "mean")
        mean(array)                       # waits, returns array
        moving = mean.start(array)        # or: compute meanwhile, moving.poll() moves it on
        moving.wait()

    An array is a contiguous, writable NumPy array or torch CPU tensor: floats of 16, 32 or 64 bits, complex numbers,
    and for a sum also integers, which wrap. All ranks make the same calls in the same order, else CollectiveMismatch on
    all. Raises ValueError for a reduction or an array that cannot be used.
    """

    def __init__(self, mesh: Mesh, reduction: str = "sum"):
        check_reduction(reduction)
        self.reduction = reduction
        self._ring = mesh.data.ring

    def __call__(self, array, name: str = ""):
        """Reduces `array` in place and returns it. `name` stands in error messages. Collective."""
        self.start(array, name).wait()
        return array

    def start(self, array, name: str = ""):
        """Begins; returns an operation to poll until True, or to wait for. The array is the call's until then."""
        if self.reduction == "mean":
            return Mean(self._ring, array, name).start()
        return self._ring.all_reduce(array, name).start()


class Mean:
    """A sum on its way that ends with a division. Start, poll until True or wait, as any operation; also again."""

    def __init__(self, ring, array, name: str):
        as_buffer(array)  # which says what cannot be used
        self._array = array.detach() if hasattr(array, "detach") else array
        _check_divisible(self._array, name)
        self._wide = _widened(self._array)
        self._sum = ring.all_reduce(self._wide, name)
        self.name, self._size = self._sum.name, ring.size
        self._divided = False

    @property
    def done(self) -> bool:
        return self._divided

    def start(self) -> "Mean":
        self._divided = False
        if self._wide is not self._array:
            self._wide[...] = self._array
        self._sum.start()
        return self

    def poll(self) -> bool:
        """Moves on what can be moved without waiting. Raises CollectiveMismatch."""
        if not self._divided and self._sum.poll():
            self._divide()
        return self._divided

    def wait(self) -> None:
        """Returns when the mean is there."""
        if not self._divided:
            self._sum.wait()
            self._divide()

    def _divide(self) -> None:
        self._divided = True
        with np.errstate(all="ignore"):
            self._wide /= self._size
            if self._wide is not self._array:
                self._array[...] = self._wide


def check_reduction(reduction: str) -> None:
    """ValueError for what is neither sum nor mean."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: it is {' or '.join(map(repr, REDUCTIONS))}")


def _check_divisible(array, name: str) -> None:
    if isinstance(array, np.ndarray):
        divisible = array.dtype.kind in "fc"
    else:
        divisible = array.is_floating_point() or array.is_complex()
    if not divisible:
        what = f"'{name}' ({array.dtype})" if name else f"an array of {array.dtype}"
        raise ValueError(f"the mean of {what} is not an integer; use reduction='sum', or convert it to float64")


def _widened(array):
    """An array of its shape in float32 for floats of 16 bits, itself otherwise."""
    if array.dtype.itemsize != 2:
        return array
    return np.empty(array.shape, np.float32) if isinstance(array, np.ndarray) else array.float()
