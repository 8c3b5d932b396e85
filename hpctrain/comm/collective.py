"""One call on a ring, as an operation that moves on whenever it is polled.

`plan/ring.py` says which chunk goes where in which step; here each chunk is cut into segments, so that adding one
segment overlaps with moving the next, and a segment is sent on as soon as it has arrived.
"""

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpctrain.comm.buffer import Buffer, allocate, as_buffer
from hpctrain.comm.call import Call
from hpctrain.comm.progress import take_back
from hpctrain.comm.tags import RING
from hpctrain.plan import ring as steps
from hpctrain.plan.grid import split_evenly

if TYPE_CHECKING:
    from hpctrain.comm.ring import Ring

WINDOW = 8  # receives posted ahead


class Span(NamedTuple):
    """Elements [start, stop) of the array."""

    start: int
    stop: int


class Collective(Call):
    """One call along a ring."""

    algorithm = "ring"

    def __init__(
        self, ring: "Ring", operation: str, array, name: str, *, reduce: bool, gather: bool, control: bool = False
    ):
        super().__init__(ring, name or operation)
        self._operation, self._control = operation, control
        self._array = array  # keeps the memory alive
        self.native = as_buffer(array)
        if reduce:
            self.native.check_summable()
        self._itemsize = self.native.partial.itemsize if reduce else self.native.itemsize
        self._lay_out(reduce, gather)

    @property
    def wire_itemsize(self) -> int:
        """Bytes of the longest message's numbers."""
        return self._itemsize

    def _lay_out(self, reduce: bool, gather: bool) -> None:
        """Sends and receives as spans, in order: all segments of a step, then the next step."""
        rank, size = self._ring.rank, self._ring.size
        chunks = split_evenly(len(self.native), size)
        longest = len(chunks[0]) * self.wire_itemsize
        self._pieces = pieces = max(1, -(-longest // self._ring.segment_bytes))
        spans = [[Span(c.start + p.start, c.start + p.stop) for p in split_evenly(len(c), pieces)] for c in chunks]
        reducing = steps.scatter_reduce(rank, size) if reduce else []
        gathering = steps.all_gather(rank, size) if gather else []
        self._sends = [span for step in reducing + gathering for span in spans[step.send]]
        self._receives = [span for step in reducing + gathering for span in spans[step.receive]]
        self._num_reducing = len(reducing) * pieces
        self._scratch_span = max((stop - start for start, stop in spans[0]), default=0)

    def start(self) -> "Collective":
        """Begins; returns self. All ranks must start the same calls in the same order."""
        if self._ring.size == 1:
            self._started, self.began = True, time.perf_counter()
            return self
        self._begin()
        self._tag = RING[self._ring.num_calls % len(RING)]
        operation = self._called(self._operation)
        self._signature = self._ring.announce(operation, self._described_dtype(), len(self.native), self.name)
        self._under_way = deque()  # receives in order, posted and not yet taken
        self._sending = deque()  # (request, message) in order
        self._num_received = self._num_posted = self._num_sends_begun = self._num_sends_done = 0
        self._confirmed = False
        self._reserve()
        self._enlist()
        self._open()
        self.poll()
        return self

    def poll(self) -> bool:
        """Moves on what can be moved without waiting. Raises CollectiveMismatch."""
        if self.done:
            return self._is_over()
        if not self._confirmed:
            self._confirmed = self._ring.channel.confirmed(self._signature)
            if not self._confirmed:
                return False
        self._retire_sends()
        self._post_receives()
        while self._under_way and self._under_way[0].Test():
            self._under_way.popleft()
            self._take()
            self._retire_sends()
            self._post_receives()
        is_through = self._num_received == len(self._receives) and self._num_sends_done == len(self._sends)
        if is_through and self._has_settled():
            self._leave()
        else:
            self._ring.channel.poll()
        return self.done

    def abandon(self) -> None:
        """Takes back the receives of a call that will not be finished."""
        take_back(self._under_way)

    def _reserve(self) -> None:
        """Memory for partial sums, and for what arrives to be added."""
        self._partials = self.native.partials() if self._num_reducing else self.native
        slots = min(WINDOW, self._num_reducing)
        length = self._scratch_span
        memory = allocate(slots * length * self._itemsize).view(self._partials.values.dtype)
        self._scratch = [Buffer(memory[slot * length : (slot + 1) * length]) for slot in range(slots)]

    def _open(self) -> None:
        """Sends what needs nothing from others."""
        for _ in range(min(self._pieces, len(self._sends))):
            self._send_next()

    def _has_settled(self) -> bool:
        """Everything has come and gone: whether the result is there."""
        return True

    def _memory(self, index: int) -> Buffer:
        return self._partials if index < self._num_reducing else self.native

    def _outgoing(self, index: int) -> np.ndarray:
        """What send `index` carries; it stays as it is until it has left."""
        return self._memory(index).message(*self._sends[index])

    def _incoming(self, index: int) -> np.ndarray:
        """Where receive `index` lands."""
        start, stop = self._receives[index]
        if index < self._num_reducing:
            return self._scratch[index % WINDOW].message(0, stop - start)
        return self.native.message(start, stop)

    def _take_in(self, index: int) -> None:
        """Receive `index` has landed: add it, or it lies in place already."""
        if index >= self._num_reducing:
            return
        start, stop = self._receives[index]
        self._partials.add(start, self._scratch[index % WINDOW].values[: stop - start])
        if index >= self._num_reducing - self._pieces:
            self.native.finish(start, stop, self._partials, self.divisor)

    def _send_next(self) -> None:
        message = self._outgoing(self._num_sends_begun)
        self._num_sends_begun += 1
        self._send(message)

    def _send(self, message: np.ndarray) -> None:
        request = self._ring.comm.Isend(message, (self._ring.rank + 1) % self._ring.size, self._tag)
        self._sending.append((request, message))
        self._count(message)

    def _retire_sends(self) -> None:
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()
            self._num_sends_done += 1

    def _post_receives(self) -> None:
        limit = min(len(self._receives), self._num_received + WINDOW)
        while self._num_posted < limit and self._may_overwrite(self._num_posted):
            message = self._incoming(self._num_posted)
            self._under_way.append(self._ring.comm.Irecv(message, (self._ring.rank - 1) % self._ring.size, self._tag))
            self._num_posted += 1

    def _may_overwrite(self, index: int) -> bool:
        """A gathered span lands where a partial sum was sent from: that must have left."""
        return index < self._num_reducing or self._num_sends_done > index - self._num_reducing or not self._num_reducing

    def _take(self) -> None:
        """The next message has arrived; pass on what now can travel."""
        self._take_in(self._num_received)
        self._num_received += 1
        if self._num_sends_begun < len(self._sends):
            self._send_next()

    def _count(self, message: np.ndarray) -> None:
        counters = self._ring.counters
        if self._control:
            counters.control_messages += 1
        else:
            counters.messages_sent += 1
            counters.bytes_sent += message.size
