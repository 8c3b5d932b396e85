"""An all-reduce in shared memory, as users of a ring know it: no message carries data."""

import hashlib
import time
from typing import TYPE_CHECKING

from hpctrain.comm.buffer import as_host_buffer
from hpctrain.comm.call import Call
from hpctrain.comm.compressed import check_compressible
from hpctrain.comm.node_entries import entries_of
from hpctrain.comm.signature import Signature

if TYPE_CHECKING:
    from hpctrain.comm.node import Node


class NodeSum(Call):
    """One call of all ranks of the ring whose node this is; `compress` is about messages between nodes."""

    algorithm = "windows"

    def __init__(self, node: "Node", array, name: str = "", compress: str = "none"):
        super().__init__(node.ring, name or "all_reduce")
        if compress != "none":
            check_compressible(array, name)
        self.compress = compress
        self.node, self._array = node, array
        self.native = as_host_buffer(array, "a sum in shared memory")
        self.native.check_summable()
        self._entries = entries_of(self)
        self.call, self.stamp, self._num_left = 0, 0, 0
        self._describe()
        node.sums.add(self)

    @property
    def wire(self) -> str:
        """What messages between nodes carry; on one node there are none."""
        return self.compress if self.node.across is not None else "none"

    def start(self) -> "NodeSum":
        """Begins; returns self. All ranks must start the same calls in the same order."""
        self._begin()
        self._join()
        self._enlist()
        for entry in self._entries:
            self.node.submit(entry)
        self.node.advance()
        return self

    def _describe(self) -> None:
        """What the board has of it: words, and a number that is equal where these are, and the way of summing up."""
        self.words, self._described = self.signature().words(), self.divisor
        way = f"{type(self._entries[0]).__name__} {self._entries[0].place}".encode()
        self._stamp = int.from_bytes(hashlib.blake2b(self.words + way, digest_size=8).digest(), "little") >> 2

    def _join(self) -> None:
        if self.divisor != self._described:
            self._describe()
        self.call = self._ring.join(self.name)
        self.stamp = self._stamp + self.call
        self._num_left = len(self._entries)

    def poll(self) -> bool:
        """Moves on what can be moved without waiting. Raises CollectiveMismatch."""
        if self.done:
            return self._is_over()
        self.node.advance()
        if not self.done:
            self._ring.channel.poll()
            self._ring.channel.compare(self.call, self.signature)
        return self.done

    def wait(self) -> None:
        """Starts it where that never happened; returns when the result is there, at once if it is already."""
        if not self._started:
            self.start()
        if not self.done and not self._ring.broken:
            self.node.wait_briefly(self)
        if not self.done:
            self._ring.progress.wait(self.poll)

    def run(self) -> None:
        """As start and wait; with nothing else under way by a shorter path."""
        if self._ring.active or len(self._entries) != 1 or self.node.across is not None:
            self.start()
        else:
            self._begin()
            self._join()
            try:
                if self.node.run_alone(self._entries[0]):
                    self.seconds, self._started = time.perf_counter() - self.began, True
                    return
            except BaseException:
                if not self._ring.broken:
                    self._enlist()  # whoever goes on after this is still to finish it with the others
                raise
            self._enlist()
        self.wait()

    def abandon(self) -> None:
        """What is posted is posted between nodes, and taken back there."""

    def signature(self) -> Signature:
        """What this rank calls."""
        native = self.native
        return Signature(
            self._ring.rank, self.call, self._called("all_reduce"), self._described_dtype(), len(native), self.name
        )

    def count_done(self) -> None:
        """One more entry went through."""
        self._num_left -= 1
        if self._num_left == 0:
            self._leave()

    def release(self) -> None:
        """Lets go of all shared memory; it will not be started again."""
        self._entries = []
        self.native = self._array = None
