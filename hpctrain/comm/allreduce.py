"""The all-reduce as users call it: an array in, its sum or mean over the ranks out, in the same memory.

A mean is the sum, divided once, by the rank that has made it, before the others get it: so all hold the same bits. Of
floats of 16 bits both happen in float32 and one rounding follows: a sum may be infinite where the mean is not.
"""

import numpy as np

from hpctrain.comm.buffer import as_buffer
from hpctrain.comm.call import Call, wire_share
from hpctrain.comm.compressed import check_compress, check_compressible, doubling
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.node_sum import NodeSum
from hpctrain.comm.ring import Ring
from hpctrain.comm.through_host import on_host
from hpctrain.plan.allreduce import choose

REDUCTIONS = ("sum", "mean")


class AllReduce:
    """Replaces arrays by their sum or mean over the replicas of `mesh`, the same bits on every rank.

        mean = AllReduce(mesh, "mean")
        mean(array)                       # waits, returns array
        moving = mean.start(array)        # or: compute meanwhile, moving.poll() moves it on
        moving.wait()
        gradients = mean.empty(1000)      # in memory that the ranks of a node share: several times as fast

    `algorithm`: "ring" and "doubling" (for few numbers), by messages; "windows", through the memory that the ranks of a
    node share, and by messages between nodes; "auto", the fastest one of these (hpctrain/plan/allreduce.py), by the
    constants that the mesh's `tuning` has.

    `compress` "bf16": messages carry bfloat16, half the bytes of float32. Each rank adds up in the array's own dtype;
    each message is rounded to nearest as it leaves, so the sum is off by at most the number of ranks times 2^-8 of the
    sum of magnitudes. float32 and float64 only. Within a node "windows" sends nothing, and rounds nothing; where all
    ranks share one, neither does "auto", whatever it takes: say "ring" for messages of half the bytes there.

    An array is a contiguous, writable NumPy array or torch CPU tensor: floats of 16, 32 or 64 bits, complex numbers,
    and for a sum also integers, which wrap. So are CuPy's arrays and CUDA tensors: "auto" sums them on the device,
    along the ring; what is compressed, and the other algorithms, by way of the host. All ranks make the same calls in
    the same order, else CollectiveMismatch on all. Raises ValueError for a reduction, an algorithm, a compression or an
    array that cannot be used.
    """

    def __init__(self, mesh: Mesh, reduction: str = "sum", algorithm: str = "auto", compress: str = "none"):
        check_reduction(reduction)
        check_algorithm(algorithm, mesh.data.ring)
        check_compress(compress)
        self.reduction, self.algorithm, self.compress = reduction, algorithm, compress
        self._data = mesh.data

    def empty(self, shape, dtype=np.float32) -> np.ndarray:
        """An uninitialised array, shared where there is shared memory; torch.from_numpy makes a tensor of it.

        Collective, equally many numbers of one dtype on all ranks. It is given back when the mesh is closed, if nothing
        looks at it any more, else when the program ends: so ask for it once, not for each call.
        """
        like = np.empty(0, _dtype(dtype))
        as_buffer(like).check_summable()
        lengths = tuple(np.atleast_1d(np.asarray(shape, np.int64)))
        if any(length < 0 for length in lengths):
            raise ValueError(f"shape={shape}: a length is negative")
        return self._data.allocate(int(np.prod(lengths)) * like.itemsize).view(like.dtype).reshape(lengths)

    def __call__(self, array, name: str = ""):
        """Reduces `array` in place and returns it. `name` stands in error messages. Collective."""
        operation = self.prepare(array, name)
        operation.run()
        operation.release()
        return array

    def start(self, array, name: str = ""):
        """Begins; returns an operation to poll until True, or to wait for. The array is the call's until then."""
        return self.prepare(array, name).start()

    def prepare(self, array, name: str = ""):
        """The operation, not begun: for an array that is reduced many times, each time by `start()` and `wait()`."""
        operation = all_reduce(self._data.ring, array, name, self.algorithm, self.compress)
        if self.reduction == "mean":
            _check_divisible(array, name)
            operation.divisor = self._data.size
        return operation


def all_reduce(ring: Ring, array, name: str = "", algorithm: str = "auto", compress: str = "none") -> Call:
    """The sum over the ranks of `ring`, by the algorithm that is best for this array; not begun."""
    if compress != "none":
        check_compressible(array, name)
        compress = wire_of(ring, algorithm, compress)
    buffer, node = as_buffer(array), ring.node
    if ring.size == 1 or (buffer.device is not None and algorithm in ("auto", "ring")):
        return ring.all_reduce(array, name, compress)
    if buffer.device is not None:
        return on_host(ring, array, name, lambda each: all_reduce(ring, each, name, algorithm, compress))
    nbytes = len(buffer) * buffer.itemsize
    in_window = node is not None and node.locate(buffer.values) is not None
    takes = node is not None and (in_window or node.takes(nbytes))
    share = wire_share(compress, buffer.itemsize)
    chosen = choose(algorithm, nbytes, ring.size, takes, in_window, ring.spans_nodes, ring.constants, share)
    if chosen == "windows":
        return NodeSum(node, array, name, compress)
    return (doubling if chosen == "doubling" else Ring.all_reduce)(ring, array, name, compress)


def wire_of(ring: Ring, algorithm: str, compress: str) -> str:
    """What messages carry: on one node `auto` rounds nothing, so that its bits do not depend on what it takes."""
    return "none" if algorithm == "auto" and not ring.spans_nodes else compress


def check_algorithm(algorithm: str, ring: Ring) -> None:
    """ValueError where these ranks cannot use it."""
    choose(algorithm, 0, ring.size, ring.node is not None or ring.size == 1, False)


def check_reduction(reduction: str) -> None:
    """ValueError for what is neither sum nor mean."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: it is {' or '.join(map(repr, REDUCTIONS))}")


def _dtype(given) -> np.dtype:
    try:
        return np.dtype(given)
    except TypeError:
        raise ValueError(f"dtype={given}: it is no dtype of NumPy, such as numpy.float32") from None


def _check_divisible(array, name: str) -> None:
    if hasattr(array, "is_floating_point"):
        divisible = array.is_floating_point() or array.is_complex()
    else:
        divisible = array.dtype == "bfloat16" or np.dtype(array.dtype).kind in "fc"
    if not divisible:
        what = f"'{name}' ({array.dtype})" if name else f"an array of {array.dtype}"
        raise ValueError(f"the mean of {what} is not an integer; use reduction='sum', or convert it to float64")
