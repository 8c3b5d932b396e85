"""Ranks with fewer batches than others: those that are done stand in for themselves until the last one is.

Each synchronised backward begins with a count of who still has batches. A rank that has none takes part in the sums
with zeros, and then makes the same update as the others: torch's join leaves that out, so that the optimizer of a rank
that was done early falls behind in its momentum and its count of steps.
"""

from collections.abc import Callable

import numpy as np

from hpctrain.comm.group import Group


class Attendance:
    """Counts the ranks that still have batches."""

    def __init__(self, group: Group):
        self._active = np.zeros(1, np.int64)
        self._count = group.ring.one_shot(self._active, "ranks with batches")

    def count(self, active: bool) -> int:
        """Number of ranks that call this with `active`. Collective."""
        self._active[0] = active
        self._count.start()
        self._count.wait()
        return int(self._active[0])


def as_call(step) -> Callable[[], object]:
    """What makes one update: `step.step`, or `step` itself. ValueError for what is neither."""
    if callable(getattr(step, "step", None)):
        return step.step
    if callable(step):
        return step
    raise ValueError(f"join: {type(step).__name__} is no update; give objects with .step(), or functions")
