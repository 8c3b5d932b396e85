"""What the ranks of a node tell each other through shared memory: how far each has come, and what it calls.

Each rank writes to its own part only. A counter goes up by one with each entry, in the same order on all ranks, so
"has rank r come to entry k" is one comparison. A fence stands between what a counter announces and the counter, on
both sides: processors with a weak memory order may otherwise show the counter first.
"""

import os
import time

from hpctrain.comm.signature import HEADER, Signature
from hpctrain.comm.windows import Window

SLOTS = 16  # entries that may be under way: what the next one writes, nobody reads any more
CACHE_LINE = 8  # integers of 8 bytes
ARRIVED, REDUCED, DONE = 0, CACHE_LINE, 2 * CACHE_LINE  # last entry whose data is there, is summed up, is read
_STAMPS = 3 * CACHE_LINE
_CALLS = _STAMPS + SLOTS
_NUM_INTEGERS = _CALLS + SLOTS
WORDS = len(Signature(0, 0, "", "", 0, "").words())
NBYTES = 8 * _NUM_INTEGERS + SLOTS * WORDS


class Board:
    """The boards of all ranks, at the beginning of `window`. A stamp is short for words: equal where they are."""

    def __init__(self, window: Window, rank: int):
        memories = [memoryview(part) for part in window.parts]
        self._integers = [memory[: 8 * _NUM_INTEGERS].cast("q") for memory in memories]
        self._words = [memory[8 * _NUM_INTEGERS : NBYTES] for memory in memories]
        self._own = self._integers[rank]
        self._others = [(other, each) for other, each in enumerate(self._integers) if other != rank]
        self._own_words = self._words[rank]
        self._posted: list[bytes | None] = [None] * SLOTS

    def post(self, entry: int, call: int, stamp: int, words: bytes) -> None:
        """What this rank calls; to be announced by `ARRIVED`."""
        slot = entry % SLOTS
        self._own[_STAMPS + slot] = stamp
        self._own[_CALLS + slot] = call
        if self._posted[slot] is not words:  # else they stand there
            self._own_words[slot * WORDS : (slot + 1) * WORDS] = self._posted[slot] = words

    def announce(self, counter: int, entry: int) -> None:
        self._own[counter] = entry

    def reached(self, counter: int, entry: int) -> bool:
        """Whether all ranks have, this one too."""
        for board in self._integers:  # noqa: SIM110 -- in the innermost loop of a wait, where all() is slower
            if board[counter] < entry:
                return False
        return True

    def wait(self, counter: int, entry: int, num_spins: int, until: float) -> bool:
        """Polls until all ranks have reached it; False at the time `until` (time.perf_counter)."""
        for board in self._integers:
            spins = num_spins
            while board[counter] < entry:
                spins -= 1
                if spins < 0:
                    os.sched_yield()
                    if time.perf_counter() > until:
                        return False
        return True

    def who_disagrees(self, entry: int, stamp: int) -> int | None:
        """A rank that called something else, once all have arrived."""
        slot = _STAMPS + entry % SLOTS
        for rank, board in self._others:
            if board[slot] != stamp:
                return rank
        return None

    def signature(self, rank: int, entry: int, named: int) -> Signature:
        """What that rank calls; `named` is its rank in the error."""
        slot = entry % SLOTS
        words = bytes(self._words[rank][slot * WORDS : (slot + 1) * WORDS])
        return Signature.unpack(HEADER.pack(named, self._integers[rank][_CALLS + slot]) + words)
