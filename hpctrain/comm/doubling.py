"""An all-reduce by recursive doubling: for few numbers between ranks that are far apart."""

import time
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from hpctrain.comm.buffer import Buffer, allocate, as_host_buffer
from hpctrain.comm.call import Call
from hpctrain.comm.progress import take_back
from hpctrain.comm.tags import DOUBLING
from hpctrain.plan.doubling import Kind, steps

if TYPE_CHECKING:
    from hpctrain.comm.ring import Ring


class Doubling(Call):
    """One call of all ranks of a ring.

    Its tag comes from the signature, so what a rank sends that calls something else is not taken: the ring tells it.
    Calls of one tag go one after another, for a later step of one may come after the first step of the next.
    """

    algorithm = "doubling"

    def __init__(self, ring: "Ring", array, name: str = ""):
        super().__init__(ring, name or "all_reduce")
        self._array = array
        self.native = as_host_buffer(array, "a sum by doubling")
        self.native.check_summable()
        self._steps = steps(ring.rank, ring.size)
        self._arriving: Buffer | None = None
        self._sends: list[Any] = []
        self._receives: list[Any] = []

    def start(self) -> "Doubling":
        """Begins; returns self. All ranks must start the same calls in the same order."""
        ring = self._ring
        if ring.size == 1:
            self._started, self.began = True, time.perf_counter()
            return self
        self._begin()
        self._signature = ring.announce(self._called("doubling"), self._described_dtype(), len(self.native), self.name)
        sixteen = crc32(self._signature.words()) % (len(DOUBLING) // 16)
        self._tag = DOUBLING[16 * sixteen + self._signature.call % 16]
        self._partials = self.native.partials()
        self._next, self._confirmed = 0, False
        self._before = self._of_the_same_tag()
        self._enlist()
        if self._before is None:
            self._begin_step()
        self.poll()
        return self

    def poll(self) -> bool:
        """Moves on what can be moved without waiting. Raises CollectiveMismatch."""
        if self.done:
            return self._is_over()
        self._confirmed = self._confirmed or self._ring.channel.confirmed(self._signature)
        if self._before is not None:
            self._wait_for_turn()
        while self._before is None and self._next < len(self._steps) and self._step_is_done():
            self._take_in(*self._steps[self._next])
            self._next += 1
            self._begin_step()
        if self._confirmed and self._next == len(self._steps):
            self._complete()
            self._leave()
        else:
            self._ring.channel.poll()
        return self.done

    def abandon(self) -> None:
        """Takes back the receives of a call that will not be finished."""
        take_back(self._receives)

    def _of_the_same_tag(self) -> "tuple[Doubling, int] | None":
        """The last call under way whose messages could be taken for this one's."""
        same = [each for each in self._ring.active if isinstance(each, Doubling) and each._tag == self._tag]
        return (same[-1], same[-1]._signature.call) if same else None

    def _wait_for_turn(self) -> None:
        """Once that call is done here it has sent everything, and what is sent from now on comes after it."""
        other, call = self._before
        if other.done or other._signature.call != call:
            self._before = None
            self._begin_step()

    def _begin_step(self) -> None:
        if self._next == len(self._steps):
            return
        kind, peer = self._steps[self._next]
        comm = self._ring.comm
        if kind in (Kind.SEND, Kind.EXCHANGE):
            message = self._outgoing(kind)
            self._sends = [comm.Isend(message, peer, self._tag)]
            self._ring.counters.messages_sent += 1
            self._ring.counters.bytes_sent += message.size
        if kind != Kind.SEND:
            self._receives = [comm.Irecv(self._incoming(kind), peer, self._tag)]

    def _step_is_done(self) -> bool:
        self._sends = [request for request in self._sends if not request.Test()]
        self._receives = [request for request in self._receives if not request.Test()]
        return not (self._sends or self._receives)

    def _outgoing(self, kind: Kind) -> np.ndarray:
        """What leaves in a step; it stays as it is until it has left."""
        return self._partials.message(0, len(self.native))

    def _incoming(self, kind: Kind) -> np.ndarray:
        """Where it lands."""
        if kind == Kind.RECEIVE:
            return self._partials.message(0, len(self.native))
        if self._arriving is None:
            partial = self.native.partial
            self._arriving = Buffer(allocate(len(self.native) * partial.itemsize).view(partial))
        return self._arriving.message(0, len(self.native))

    def _take_in(self, kind: Kind, peer: int) -> None:
        """The messages of a step have left and landed."""
        if kind in (Kind.ADD, Kind.EXCHANGE):
            own, received = self._partials.values, self._arriving.values
            first, second = (received, own) if peer < self._ring.rank else (own, received)
            with np.errstate(all="ignore"):
                np.add(first, second, out=own)

    def _complete(self) -> None:
        """All steps are done: this rank has the sum."""
        self.native.finish(0, len(self.native), self._partials, self.divisor)
