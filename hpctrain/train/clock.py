"""This rank's clock against that of rank 0, over a whole run."""

from hpctrain.comm.clock import clock_offsets
from hpctrain.comm.mesh import Mesh


class Clock:
    """Compared at the beginning and by `end`: `offset` is the mean of both, `error` says how far off it may be.

    Two clocks run apart a little, so at either end of a long run the mean is off by half of what they drifted.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._first = clock_offsets(mesh.world)
        self.offset, self.error = self._first

    def end(self) -> None:
        """Collective."""
        (first, before), (last, after) = self._first, clock_offsets(self._mesh.world)
        self.offset, self.error = (first + last) / 2, max(before, after) + abs(last - first) / 2
