"""The ranks of a node, which sum up straight from each other's memory; between nodes their sums travel by messages.

    entry   | arrive: the rank's numbers are there     | every rank announces each of these on its board, and comes
            | reduce: its chunk is summed, or all of it | to the next when all others have announced the one before;
            | (cross: so are the chunks of all nodes)   | so no rank waits for more than it needs
            | finish: the sums are taken over           |

All entries go through in the order of the calls; several are under way at a time, each as far as it can be.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from hpctrain.comm.board import ARRIVED, DONE, NBYTES, REDUCED, SLOTS, Board
from hpctrain.comm.buffer import allocate, quietly
from hpctrain.comm.ring import Ring
from hpctrain.comm.shared_memory import has_room
from hpctrain.comm.signature import CollectiveMismatch, Signature
from hpctrain.comm.windows import PAGE, Window

FLAT_BYTES = 64 << 10  # up to here every rank sums up everything: one wait instead of two
STAGE_BYTES = 1 << 20  # of a rank's numbers that come from elsewhere, at a time
NUM_STAGES = 2
LARGEST_ITEM = 32  # bytes: two long doubles
NUM_FLAT = 4  # sums of few numbers that may be under way
BLOCK_BYTES = 256 << 10  # summed at a time, so that it stays in the cache until it is written to all
PATIENCE = 1e-3  # seconds of polling before a rank waits as it does for messages
NUM_SPINS = 100  # polls before the core is given to others, where each rank has one
_STAGES_AT = -(-NBYTES // 64) * 64


class Node:
    """The ranks of `ring` that share this rank's node: `members`, by their numbers on the ring. Collective.

    `comm` holds the members; `across` is a ring of one rank of each node, this one among them, or None where all are on
    one node. `stage_bytes` 0: of what does not lie in its own memory it sums up only few numbers. `num_rings` ask for
    memory at a time, this one included.
    """

    def __init__(self, ring: Ring, comm, members: list[int], across: Ring | None, stage_bytes: int, num_rings: int = 1):
        self._num_rings = num_rings
        self.ring, self.members, self.across, self.stage_bytes = ring, members, across, stage_bytes
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._flat_at = _rounded(_STAGES_AT + NUM_STAGES * stage_bytes)  # in the part of rank 0
        window = Window(comm, self._flat_at + (self.flat_bytes(self.size) if self.rank == 0 else 0))
        self.windows = [window]
        self.board, self._fence = Board(window, self.rank), window.fence
        longest = max(BLOCK_BYTES, FLAT_BYTES + LARGEST_ITEM * self.size)
        self.scratch = allocate(2 * longest)  # 16-bit floats become twice as long
        self.quietly = quietly()
        self.num_staged = 0  # entries, so far
        self.last_staged = [0] * NUM_STAGES
        self._entries: deque = deque()
        self._num_submitted = 0
        self._num_arrived = self._num_summed = self._num_reduced = 0  # of those under way
        self._num_spins = NUM_SPINS if self.size <= len(os.sched_getaffinity(0)) else 1
        self.sums: weakref.WeakSet = weakref.WeakSet()

    @staticmethod
    def flat_bytes(size: int) -> int:
        """For few numbers of `size` ranks, chunks rounded up to one length."""
        return NUM_FLAT * size * (FLAT_BYTES + LARGEST_ITEM * size)

    @staticmethod
    def bytes_needed(size: int, stage_bytes: int) -> int:
        """Of shared memory, for all `size` ranks."""
        return size * _rounded(_STAGES_AT + NUM_STAGES * stage_bytes) + Node.flat_bytes(size)

    def flat_memory(self, slot: int) -> np.ndarray:
        """What all ranks write few numbers to, and read them from."""
        length = self.flat_bytes(self.size) // NUM_FLAT
        return self.windows[0].parts[0][self._flat_at + slot * length : self._flat_at + (slot + 1) * length]

    def stage_views(self, stage: int, dtype: np.dtype) -> list[np.ndarray]:
        """The memory of all ranks for numbers that are copied in and out."""
        begin = _STAGES_AT + stage * self.stage_bytes
        return [part[begin : begin + self.stage_bytes].view(dtype) for part in self.windows[0].parts]

    def submit(self, entry) -> None:
        """It goes through when those before it have. The same entries in the same order on all ranks."""
        self._num_submitted += 1
        entry.number = self._num_submitted
        self._entries.append(entry)

    def run_alone(self, entry) -> bool:
        """All steps of an entry while nothing else is under way, on one node; False: it is not done yet.

        The same as submit and advance until it is done, in half the time; advance goes on from wherever it stops.
        """
        board, fence = self.board, self._fence
        self.submit(entry)
        total, number = entry.sum, entry.number
        if not (board.reached(DONE, number - SLOTS) and entry.may_arrive()):
            return False
        entry.arrive()
        board.post(number, total.call, total.stamp, total.words)
        fence()
        board.announce(ARRIVED, number)
        self._num_arrived = 1
        if not board.wait(ARRIVED, number, self._num_spins, time.perf_counter() + PATIENCE):
            return False
        self._reduce(entry)
        fence()
        board.announce(REDUCED, number)
        self._num_summed = self._num_reduced = 1
        if not entry.is_alone and not board.wait(REDUCED, number, self._num_spins, time.perf_counter() + PATIENCE):
            return False
        fence()
        entry.finish()
        fence()
        board.announce(DONE, number)
        self._entries.clear()
        self._num_arrived = self._num_summed = self._num_reduced = 0
        return True

    def advance(self) -> None:
        """Moves on everything that waits for nobody. Raises CollectiveMismatch."""
        board, entries = self.board, self._entries
        while self._num_arrived < len(entries):
            entry = entries[self._num_arrived]
            if not (board.reached(DONE, entry.number - SLOTS) and entry.may_arrive()):
                break
            entry.arrive()
            board.post(entry.number, entry.sum.call, entry.sum.stamp, entry.sum.words)
            self._fence()
            board.announce(ARRIVED, entry.number)
            self._num_arrived += 1
        while self._num_summed < self._num_arrived and board.reached(ARRIVED, entries[self._num_summed].number):
            self._reduce(entries[self._num_summed])
            self._num_summed += 1
        if self.across is not None:
            self._over_nodes(self.across.progress.poll)  # all that cross, not only the first
        while self._num_reduced < self._num_summed and self._has_crossed(entries[self._num_reduced]):
            self._fence()
            board.announce(REDUCED, entries[self._num_reduced].number)
            self._num_reduced += 1
        while self._num_reduced and (entries[0].is_alone or board.reached(REDUCED, entries[0].number)):
            entry = entries.popleft()
            self._num_arrived -= 1
            self._num_summed -= 1
            self._num_reduced -= 1
            self._fence()
            entry.finish()
            self._fence()
            board.announce(DONE, entry.number)
            entry.sum.count_done()

    def _reduce(self, entry) -> None:
        self._fence()
        other = self.board.who_disagrees(entry.number, entry.sum.stamp)
        if other is not None:
            self._refuse(self.board.signature(other, entry.number, self.members[other]), entry.sum.signature())
        self._over_nodes(lambda: self.quietly(entry.reduce))

    def _has_crossed(self, entry) -> bool:
        """Whether the sums of all nodes are there."""
        return self.across is None or self._over_nodes(entry.has_crossed)

    def _over_nodes(self, move: Callable[[], Any]) -> Any:
        """What `move` returns; a disagreement between nodes that it finds is told to all ranks of all nodes."""
        try:
            return move()
        except CollectiveMismatch:
            self._refuse(*self.across.channel.disagreement)

    def _refuse(self, first: Signature, second: Signature) -> NoReturn:
        self._entries.clear()
        self._num_arrived = self._num_summed = self._num_reduced = 0
        self.ring.channel.refuse(first, second)

    def wait_briefly(self, total) -> None:
        """Polls for as long as others that run take to answer, and returns when `total` is done or they take longer."""
        while not total.done and self.across is None:
            if not self.board.wait(*self._awaited(), self._num_spins, time.perf_counter() + PATIENCE):
                return
            self.advance()

    def _awaited(self) -> tuple[int, int]:
        """The counter that the first entry under way waits for, and what it must reach."""
        first = self._entries[0]
        if self._num_reduced:
            return REDUCED, first.number
        return (ARRIVED, first.number) if self._num_arrived else (DONE, first.number - 1)

    def locate(self, values: np.ndarray) -> tuple[int, int] | None:
        """The number of the window that holds the array, and where in this rank's part it lies."""
        address = values.ctypes.data
        for number, window in enumerate(self.windows[1:], 1):
            offset = window.offset_of(address, values.nbytes)
            if offset is not None:
                return number, offset
        return None

    def takes(self, nbytes: int) -> bool:
        """Whether it sums up arrays of so many bytes that lie elsewhere."""
        return self.stage_bytes > 0 or (self.across is None and nbytes <= FLAT_BYTES)

    def allocate(self, nbytes: int) -> np.ndarray | None:
        """This rank's part of further shared memory, zeros; None on all ranks where it does not fit. Collective."""
        self.ring.agree("allocate", "uint8", nbytes)
        if not has_room(self.ring, self.size * nbytes, self._num_rings):
            return None
        self.windows.append(Window(self.comm, nbytes))
        return self.windows[-1].own[:nbytes]

    def close(self) -> None:
        """Gives back the windows that no rank looks at any more. Collective, when nothing is under way."""
        for each in list(self.sums):
            each.release()
        del self.board
        for window in self.windows:
            window.release()
        held = np.array([window.is_held for window in self.windows], np.int32)
        self.ring.one_shot(held, "windows in use").start().wait()
        self.ring.agree("free")
        for window, num_holders in zip(self.windows, held):
            if num_holders == 0:
                window.free()
        self.windows = []
        if self.across is not None:
            self.across.close()
            self.across.comm.Free()
            self.comm.Free()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
