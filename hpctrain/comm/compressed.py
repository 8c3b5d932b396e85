"""Sums of float32 and float64 whose messages carry bfloat16: half the bytes of float32, a quarter of those of float64.

Each rank adds up in the array's own dtype. A message is rounded when it leaves, so a number is rounded once at each hop
of its sum, and once more when the sum is complete. In the all-gather the bits are passed on as they came. Who made the
sum keeps what the others get, so all ranks end with the same bits; also where only the owner of a chunk gets its sum,
and nothing would have to leave: a shared optimizer steps with the bits that a whole one would.
"""

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.buffer import Buffer, allocate, as_buffer
from hpctrain.comm.call import WIRE_ITEMSIZE
from hpctrain.comm.collective import Collective
from hpctrain.comm.doubling import Doubling
from hpctrain.plan.compression import WIRE
from hpctrain.plan.doubling import Kind

if TYPE_CHECKING:
    from hpctrain.comm.ring import Ring


def check_compress(compress: str) -> None:
    """ValueError for what is no compression of messages."""
    if compress not in WIRE:
        raise ValueError(f"compress={compress!r}: it is {' or '.join(map(repr, WIRE))}")


def check_compressible(array, name: str = "") -> None:
    """ValueError for what is not float32 or float64 in the machine's own byte order."""
    buffer = as_buffer(array)
    if buffer.values.dtype not in (np.float32, np.float64):
        what = f"'{name}' is" if name else "this array is"
        raise ValueError(f"compress='bf16': {what} {buffer.dtype}; only sums of float32 and float64 are compressed")


class CompressedCollective(Collective):
    """As Collective, of a reduction. `_bits` is what travels of each number.

    A span of them has one use at a time: a partial sum lands there, is added to the numbers, and the larger sum leaves
    from there; then the whole sum lands there, and is passed on. So no further memory is needed.
    """

    compress = "bf16"

    def __init__(self, ring: "Ring", operation: str, array, name: str, *, gather: bool):
        check_compressible(array, name)
        super().__init__(ring, operation, array, name, reduce=True, gather=gather)
        self._bits: Buffer | None = None

    @property
    def wire_itemsize(self) -> int:
        return WIRE_ITEMSIZE

    def _reserve(self) -> None:
        if self._bits is None:
            self._bits = Buffer(allocate(WIRE_ITEMSIZE * len(self.native)).view(np.uint16))

    def _outgoing(self, index: int) -> np.ndarray:
        start, stop = self._sends[index]
        if index < self._num_reducing:
            self._ring.bfloat16.round(self.native.values[start:stop], self._bits.values[start:stop])
        return self._bits.message(start, stop)

    def _incoming(self, index: int) -> np.ndarray:
        return self._bits.message(*self._receives[index])

    def _take_in(self, index: int) -> None:
        start, stop = self._receives[index]
        values, bits = self.native.values[start:stop], self._bits.values[start:stop]
        if index >= self._num_reducing:
            self._ring.bfloat16.widen(bits, values)
            return
        self._ring.bfloat16.add(bits, values)
        if index >= self._num_reducing - self._pieces:
            self.native.finish(start, stop, self.native, self.divisor)
            self._ring.bfloat16.keep(values, bits)


class CompressedDoubling(Doubling):
    """As Doubling. Both partners of an exchange add what both have sent, so each rounds its own numbers too."""

    compress = "bf16"

    def __init__(self, ring: "Ring", array, name: str = ""):
        check_compressible(array, name)
        super().__init__(ring, array, name)
        length = len(self.native)
        self._leaving, self._landing = (Buffer(allocate(WIRE_ITEMSIZE * length).view(np.uint16)) for _ in range(2))

    def _outgoing(self, kind: Kind) -> np.ndarray:
        convert = self._ring.bfloat16.round if kind == Kind.SEND else self._ring.bfloat16.keep
        convert(self.native.values, self._leaving.values)
        return self._leaving.message(0, len(self.native))

    def _incoming(self, kind: Kind) -> np.ndarray:
        return self._landing.message(0, len(self.native))

    def _take_in(self, kind: Kind, peer: int) -> None:
        if kind == Kind.RECEIVE:
            self._ring.bfloat16.widen(self._landing.values, self.native.values)
        elif kind in (Kind.ADD, Kind.EXCHANGE):
            self._ring.bfloat16.add(self._landing.values, self.native.values)

    def _complete(self) -> None:
        """Where some get the sum by a message, all have it rounded."""
        if self._ring.size & (self._ring.size - 1):
            self._ring.bfloat16.keep(self.native.values, self._leaving.values)
        super()._complete()


def doubling(ring: "Ring", array, name: str = "", compress: str = "none") -> Doubling:
    """An all-reduce by doubling, not begun."""
    check_compress(compress)
    return CompressedDoubling(ring, array, name) if compress == "bf16" else Doubling(ring, array, name)
