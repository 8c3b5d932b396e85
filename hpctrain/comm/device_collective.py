"""One call on a ring of which the memory is on a device. The order of work is stream.py's rule; the wire is the host's.

Where MPI takes memory of devices it is given that itself (direct). Elsewhere each segment goes through pinned memory of
the host (staged): one is copied while another one travels. Ranks may differ in this, for messages are the same.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

from hpctrain.comm.buffer import Buffer, as_buffer
from hpctrain.comm.collective import WINDOW, Collective

if TYPE_CHECKING:
    from hpctrain.comm.ring import Ring

NUM_LEAVING = 2  # segments in pinned memory on their way out: one is copied, one travels


def along_ring(ring: "Ring", operation: str, array, name: str, *, reduce: bool, gather: bool) -> Collective:
    """A call on a ring, wherever the memory of `array` is."""
    native = as_buffer(array)
    if native.device is None or ring.size == 1:
        kind = Collective
    else:
        kind = DirectCollective if ring.takes_device_memory else StagedCollective
    return kind(ring, operation, native, name, reduce=reduce, gather=gather)


class DirectCollective(Collective):
    """As Collective; MPI reads and writes memory of the device."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._device = self.native.device
        self._lent: list[tuple[Any, Any]] = []  # (pool, memory)

    def poll(self) -> bool:
        """Moves on what can be moved without waiting. Raises CollectiveMismatch."""
        if not self.done and not self._is_open:
            self._ring.channel.poll()
            if not self._produced.done:
                return False
            self._is_open = True
            self._occupy()
            super()._open()
        return super().poll()

    def _reserve(self) -> None:
        """Nothing yet: what the caller computes may not be there."""
        self._produced, self._is_open = self._device.produced(), False
        self._due = deque()  # sends, by index, which have no place to leave from
        self._leaving = deque()  # (event, message) in order: it may be sent when the event has passed
        self._taken: list[Any] = [None] * WINDOW  # by slot, the event behind the last work on it
        self._last = None  # the event behind all work

    def _open(self) -> None:
        """Nothing yet, as above."""

    def _occupy(self) -> None:
        """Memory for partial sums, and for what arrives to be added."""
        slots, length = min(WINDOW, self._num_reducing), self._scratch_span
        scratch = self._borrow(slots * length * self._itemsize).view(self.native.partial)
        spans = [scratch[slot * length : (slot + 1) * length] for slot in range(slots)]
        self._scratch = [Buffer(span, None, self._device) for span in spans]
        with self._device.work():
            self._partials = self.native.partials(self._borrow) if self._num_reducing else self.native

    def _borrow(self, nbytes: int):
        return self._lend(self._device.memory, nbytes)

    def _lend(self, pool, nbytes: int):
        memory = pool.lend(nbytes)
        self._lent.append((pool, memory))
        return memory[:nbytes]

    def _leave(self) -> None:
        super()._leave()
        while self._lent:
            pool, memory = self._lent.pop()
            pool.take_back(memory)

    def _has_settled(self) -> bool:
        return self._last.done

    def _send_next(self) -> None:
        self._due.append(self._num_sends_begun)
        self._num_sends_begun += 1
        self._prepare()

    def _prepare(self) -> None:
        """What is due becomes a message, which leaves when the device has come there."""
        while self._due and self._has_room():
            message = self._outgoing(self._due.popleft())
            self._leaving.append((self._device.mark(), message))

    def _has_room(self) -> bool:
        return True

    def _retire_sends(self) -> None:
        while self._leaving and self._leaving[0][0].done:
            self._send(self._leaving.popleft()[1])
        super()._retire_sends()
        self._prepare()

    def _may_overwrite(self, index: int) -> bool:
        taken = self._taken[index % WINDOW]
        return super()._may_overwrite(index) and (taken is None or taken.done)

    def _take_in(self, index: int) -> None:
        with self._device.work():
            self._land(index)
            super()._take_in(index)
        self._last = self._taken[index % WINDOW] = self._device.mark()

    def _land(self, index: int) -> None:
        """What has arrived goes to where it is needed; it is there already."""

    def _count(self, message) -> None:
        super()._count(message)
        self._ring.counters.direct_bytes += message.size


class StagedCollective(DirectCollective):
    """As Collective; MPI reads and writes pinned memory of the host only."""

    def _occupy(self) -> None:
        super()._occupy()
        self._longest = self._scratch_span * max(self._itemsize, self.native.itemsize)
        self._out = self._lend(self._device.pinned, NUM_LEAVING * self._longest)
        self._in = self._lend(self._device.pinned, WINDOW * self._longest)

    def _has_room(self) -> bool:
        return len(self._leaving) + len(self._sending) < NUM_LEAVING

    def _outgoing(self, index: int):
        source = super()._outgoing(index)
        start = index % NUM_LEAVING * self._longest
        target = self._out[start : start + source.size]
        self._device.to_host(source, target)
        return target

    def _incoming(self, index: int):
        start = index % WINDOW * self._longest
        return self._in[start : start + super()._incoming(index).size]

    def _land(self, index: int) -> None:
        self._device.to_device(self._incoming(index), super()._incoming(index))

    def _count(self, message) -> None:
        Collective._count(self, message)
        self._ring.counters.staged_bytes += message.size
