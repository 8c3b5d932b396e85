"""The ring all-reduce as users call it: an array in, its sum or mean over the ranks out, in the same memory.

A mean is the sum, divided once, by the rank that has made it, before the others get it: so all hold the same bits. Of
floats of 16 bits both happen in float32 and one rounding follows: a sum may be infinite where the mean is not.
"""

import numpy as np

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
        operation = self._ring.all_reduce(array, name)
        if self.reduction == "mean":
            _check_divisible(array, name)
            operation.divisor = self._ring.size
        return operation.start()


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
