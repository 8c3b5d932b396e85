"""The sum of a short array over all ranks in one hop: each rank sends its own to every other, and all add them up.

A ring takes 2(n-1) hops for it, and where ranks sleep while they wait each hop wakes one. What arrives is added in the
order of ranks, so all hold the same bits.
"""

from typing import TYPE_CHECKING
from zlib import crc32

from hpctrain.comm.buffer import Buffer, allocate, as_host_buffer
from hpctrain.comm.progress import take_back
from hpctrain.comm.tags import ONE_SHOT

if TYPE_CHECKING:
    from hpctrain.comm.ring import Ring


class OneShot:
    """One call on a ring: start, poll until True (or wait). It may be started again when done.

    Its tag comes from the signature, so what a rank sends that calls something else is never taken: the ring tells it.
    """

    def __init__(self, ring: "Ring", array, name: str):
        self.name, self.done = name, True
        self._ring, self._array = ring, array
        self.native = as_host_buffer(array, "a sum in one hop")
        self.native.check_summable()
        others, length = range(ring.size - 1), len(self.native)
        memory = allocate(len(others) * length * self.native.itemsize).view(self.native.values.dtype)
        self._arriving = [Buffer(memory[other * length : (other + 1) * length]) for other in others]
        self._own = Buffer(allocate(length * self.native.itemsize).view(self.native.values.dtype))

    def start(self) -> "OneShot":
        """Begins; returns self. All ranks must start the same calls in the same order."""
        ring = self._ring
        if ring.size == 1:
            return self
        if not self.done and not ring.broken:
            raise RuntimeError(f"{self.name} is under way; wait for it before starting it again")
        self._signature = ring.announce("one_shot", self.native.dtype, len(self.native), self.name)
        tag = ONE_SHOT[crc32(self._signature.pack()[4:]) % len(ONE_SHOT)]  # without the rank
        self._own.values[:] = self.native.values
        peers = [rank for rank in range(ring.size) if rank != ring.rank]
        length = len(self.native)
        self._receives = [
            ring.comm.Irecv(buffer.message(0, length), peer, tag) for buffer, peer in zip(self._arriving, peers)
        ]
        self._sends = [ring.comm.Isend(self._own.message(0, length), peer, tag) for peer in peers]
        ring.counters.control_messages += len(peers)
        self._confirmed = self.done = False
        ring.active.append(self)
        ring.progress.add(self)
        self.poll()
        return self

    def poll(self) -> bool:
        """Moves on what can be moved without waiting. Raises CollectiveMismatch."""
        if self.done:
            return True
        self._confirmed = self._confirmed or self._ring.channel.confirmed(self._signature)
        self._receives = [request for request in self._receives if not request.Test()]
        self._sends = [request for request in self._sends if not request.Test()]
        if self._confirmed and not self._receives and not self._sends:
            self._add_up()
            self.done = True
            self._ring.active.remove(self)
            self._ring.progress.remove(self)
        else:
            self._ring.channel.poll()
        return self.done

    def wait(self) -> None:
        """Returns when the result is there."""
        self._ring.progress.wait(self.poll)

    def abandon(self) -> None:
        """Takes back the receives of a call that will not be finished."""
        take_back(self._receives)

    def _add_up(self) -> None:
        shares = self._arriving.copy()
        shares.insert(self._ring.rank, self._own)
        self.native.values[:] = shares[0].values
        for share in shares[1:]:
            self.native.add(0, share.values)
