"""What ranks do on rings of several users at once, announced on the ring that they share.

Models that share a backward reach its end in another order on each rank, so each has a ring of its own, on which a
disagreement between ranks is not seen: one waits on the ring of this model, another on that of the next. So all that
end together announce themselves once, as a set.
"""

import numpy as np

from hpctrain.comm.ring import Ring


class Meeting:
    """`expect` each name, then `start` and `wait`; later calls of the same set do nothing more."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._names: set[str] = set()
        self._under_way = None

    def expect(self, name: str) -> None:
        """`name` takes part in the next start."""
        self._names.add(name)

    def forget(self, name: str) -> None:
        """It does not come after all."""
        self._names.discard(name)

    def start(self) -> None:
        """Announces those expected. CollectiveMismatch, here or in any wait, where ranks expect others. Collective."""
        if self._names:
            name = "backward of " + ", ".join(sorted(self._names))
            self._names.clear()
            self._under_way = self._ring.one_shot(np.zeros(1, np.uint8), name).start()

    def wait(self) -> None:
        """Returns when all ranks have announced the same."""
        if self._under_way is not None:
            self._under_way.wait()
