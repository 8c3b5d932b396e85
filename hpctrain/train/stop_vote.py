"""Whether to leave, agreed on by ranks that no step brings together: pipelines without a flush, workers of servers.

Each rank says as it begins a step whether a signal has asked it, and hears what all said `lag` steps before. Of one
step all hear the same, so all make the same step their last one. By then everybody has long said it, as a rule: nobody
waits but who is more than `lag` steps ahead of the slowest.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from hpctrain.comm.collective import Collective
from hpctrain.comm.group import Group
from hpctrain.comm.one_shot import OneShot

LAG_OF_FREE = 64  # steps, of workers that wait for nobody


class StopVote:
    """Over all ranks of `group`, which nothing else is called on. `asked()`: whether this one was."""

    def __init__(self, group: Group, lag: int, asked: Callable[[], bool]):
        self._lag, self._asked = lag, asked
        arrays = [np.zeros(1) for _ in range(lag + 1)]
        self._free: deque[tuple[np.ndarray, OneShot | Collective]] = deque(
            (array, group.ring.one_shot(array, "stop")) for array in arrays
        )
        self._said: deque[tuple[np.ndarray, OneShot | Collective]] = deque()  # the oldest first

    def begin_step(self) -> bool:
        """This rank begins a step; whether it is to be the last one."""
        is_last = len(self._said) == self._lag and self._hear()
        array, exchange = self._free.popleft()
        array[0] = self._asked()
        exchange.start()
        self._said.append((array, exchange))
        return is_last

    def finish(self) -> None:
        """All ranks have done the same steps. What was said in the last of them is heard by nobody."""
        while self._said:
            self._hear()

    def _hear(self) -> bool:
        array, exchange = self._said.popleft()
        exchange.wait()
        self._free.append((array, exchange))
        return bool(array[0])
