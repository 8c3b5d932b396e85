"""What all collective calls on a ring have in common: begun, polled and waited for, and begun again when done."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.comm.buffer import Buffer
    from hpctrain.comm.ring import Ring

WIRE_ITEMSIZE = 2  # bytes of what is compressed


def wire_share(compress: str, itemsize: int) -> float:
    """The bytes of a message by those of its numbers."""
    return 1.0 if compress == "none" else WIRE_ITEMSIZE / itemsize


class Call:
    """One call, by the `name` that errors give it. Subclasses have `start` and `poll`, and know their memory."""

    native: "Buffer"
    compress = "none"  # what its messages are to carry, where that is not the numbers as they are

    def __init__(self, ring: "Ring", name: str):
        self.name, self._ring = name, ring
        self._started, self.done = False, True
        self.divisor: float = 1  # each sum is divided by it, once, before it is rounded or goes to others
        self.began = self.seconds = 0.0  # the last time: by time.perf_counter, and from there to the end

    def start(self) -> "Call":
        """Begins; returns self. All ranks must start the same calls in the same order."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Moves on what can be moved without waiting; True when all is done. Raises CollectiveMismatch."""
        raise NotImplementedError

    def wait(self) -> None:
        """Starts it where that never happened; returns when the result is there, at once if it is already."""
        if not self._started:
            self.start()
        self._ring.progress.wait(self.poll)

    def run(self) -> None:
        """Start and wait."""
        self.start()
        self.wait()

    def release(self) -> None:
        """Lets go of memory, where it is not to be started again."""

    def _called(self, operation: str) -> str:
        """What the ranks must agree on: a mean is another call than a sum."""
        return operation if self.divisor == 1 else f"{operation}/{self.divisor:g}"

    @property
    def wire(self) -> str:
        """What its messages do carry."""
        return self.compress if self._ring.size > 1 else "none"

    @property
    def wire_share(self) -> float:
        """The bytes of a message by those of its numbers."""
        return 1.0 if self.wire == "none" else wire_share(self.wire, self.native.itemsize)

    def _described_dtype(self) -> str:
        """What the ranks must agree on besides."""
        return self.native.dtype if self.compress == "none" else f"{self.native.dtype} as {self.compress}"

    def _is_over(self) -> bool:
        """True, of a call that is done. RuntimeError for one that was never started: its array is what it was."""
        if not self._started:
            raise RuntimeError(f"{self.name} has not been started; start() begins it, wait() does both")
        return True

    def _begin(self) -> None:
        """RuntimeError where it is under way, or its memory is another call's."""
        if not self.done and not self._ring.broken:
            raise RuntimeError(f"{self.name} is under way; wait for it before starting it again")
        if self._ring.active:
            self._ring.check_memory(self)
        self.began = time.perf_counter()

    def _enlist(self) -> None:
        self._started, self.done = True, False
        self._ring.active.append(self)
        self._ring.progress.add(self)

    def _leave(self) -> None:
        self.seconds = time.perf_counter() - self.began
        self.done = True
        self._ring.active.remove(self)
        self._ring.progress.remove(self)
