"""The ways of summing up in shared memory, as entries that a Node takes through its steps.

- InPlace: the numbers lie in a window. Each rank sums up its own chunk out of all parts and writes the result into all.
- Staged: they lie elsewhere. Pieces of them are copied into a window, summed as above, and copied out.
- Flat: they are few. Each rank copies them into a window, and sums up everything for itself.

All add chunk c in the order c + 1, c + 2, ..., c of ranks, as the ring does: the same bits.
"""

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.board import DONE
from hpctrain.comm.crossing import Crossing, blocks
from hpctrain.comm.node import FLAT_BYTES, NUM_FLAT, NUM_STAGES
from hpctrain.plan.grid import piece_of, split_evenly

if TYPE_CHECKING:
    from hpctrain.comm.node_sum import NodeSum


class Entry:
    """One step of a sum through a Node; `number` is its place among all entries."""

    is_alone = False  # whether this rank's result needs only that all have arrived
    place = ""  # where the numbers lie in shared memory

    def __init__(self, total: "NodeSum"):
        self.sum, self.number = total, 0

    def may_arrive(self) -> bool:
        """Whether all have read what lay there before."""
        return True

    def arrive(self) -> None:
        """This rank's numbers are where the others read them."""

    def reduce(self) -> None:
        """What this rank has to sum up is summed up, or on its way over the nodes."""
        raise NotImplementedError

    def has_crossed(self) -> bool:
        """Whether the sum over all nodes is there. Raises CollectiveMismatch."""
        raise NotImplementedError

    def finish(self) -> None:
        """All others have reduced their share: this rank has the result."""


class InPlace(Entry):
    """Numbers in a window, at the same offset on all ranks."""

    def __init__(self, total: "NodeSum", number: int, offset: int):
        super().__init__(total)
        self.place = f"{number} {offset}"
        native, node = total.native, total.node
        nbytes = len(native) * native.itemsize
        parts = [part[offset : offset + nbytes].view(native.values.dtype) for part in node.windows[number].parts]
        chunk = piece_of(len(native), node.size, node.rank)
        others = [parts[(node.rank + step) % node.size] for step in range(1, node.size)]
        self._chunk = [part[chunk.start : chunk.stop] for part in (*others, parts[node.rank])]  # in the order of a sum
        self._blocks = [[part[block] for part in self._chunk] for block in blocks(len(chunk), native.itemsize)]

    def reduce(self) -> None:
        """The own chunk, in all parts."""
        total, node = self.sum, self.sum.node
        if node.across is not None:
            self._crossing = Crossing(total, self._chunk)
            return
        add_up, scratch, divisor = total.native.add_up, node.scratch, total.divisor
        for shares in self._blocks:
            add_up(shares, shares[-1], scratch, divisor)
            _write_to_all(shares)

    def has_crossed(self) -> bool:
        if not self._crossing.is_done():
            return False
        for shares in self._blocks:
            _write_to_all(shares)
        del self._crossing
        return True


def _write_to_all(shares: list[np.ndarray]) -> None:
    """The last one, which is the sum, replaces the others."""
    for other in shares[:-1]:
        np.copyto(other, shares[-1])


class Flat(Entry):
    """Few numbers, from anywhere.

    They are laid out so that one addition after another, over all numbers at once, adds each chunk in its order: what
    comes p-th in the sum of chunk c, which is rank c + 1 + p's, lies in row p. Chunks are rounded up to one length.
    Of two ranks the order does not matter, and each has a row.
    """

    is_alone = True

    def __init__(self, total: "NodeSum"):
        super().__init__(total)
        values, size = total.native.values, total.node.size
        self._length = -(-len(values) // size)
        self._padded = None
        if size > 2 and self._length * size != len(values):
            self._padded = np.empty(size * self._length, values.dtype)
            chunks = zip(split_evenly(len(values), size), self._padded.reshape(size, -1))
            self._taken = [(values[c.start : c.stop], row[: len(c)]) for c, row in chunks if len(c)]
        self._slots: list[tuple | None] = [None] * NUM_FLAT

    def _slot(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]:
        """Where this rank copies what to, and the rows that all ranks add up."""
        slot = self.number % NUM_FLAT
        if self._slots[slot] is None:
            values, node, width = self.sum.native.values, self.sum.node, self._length
            memory = node.flat_memory(slot)[: node.size**2 * width * values.itemsize].view(values.dtype)
            if node.size == 2:
                rows = [memory[: len(values)], memory[-len(values) :]] if len(values) else [memory, memory]
                self._slots[slot] = ([(rows[node.rank], values)], rows)
                return self._slots[slot]
            cube = memory.reshape(node.size, node.size, width)
            copies = []
            for chunks, length in self._runs():
                row = (node.rank - chunks.start - 1) % node.size  # of the first chunk; that of the next is one less
                targets = cube[row::-1, chunks.start : chunks.stop, :length][: len(chunks)]
                begin = piece_of(len(values), node.size, chunks.start).start
                source = values[begin : begin + len(chunks) * length].reshape(len(chunks), length)
                copies.append((np.einsum("iij->ij", targets), source))  # a view
            self._slots[slot] = (copies, [row.reshape(-1) for row in cube])
        return self._slots[slot]

    def _runs(self) -> list[tuple[range, int]]:
        """Consecutive chunks of one length whose rows are consecutive too, and that length."""
        size, rank = self.sum.node.size, self.sum.node.rank
        num_long = len(self.sum.native) % size or size
        borders = sorted({0, rank, num_long, size})
        runs = [(range(a, b), self._length - (a >= num_long)) for a, b in zip(borders, borders[1:])]
        return [(chunks, length) for chunks, length in runs if length]

    def may_arrive(self) -> bool:
        """Whether all have read what lay there before."""
        return self.sum.node.board.reached(DONE, self.number - NUM_FLAT)

    def arrive(self) -> None:
        copies, self._rows = self._slot()
        for target, source in copies:
            np.copyto(target, source)

    def reduce(self) -> None:
        """Everything, for this rank alone."""
        total = self.sum
        if self._padded is None:
            total.native.add_up(self._rows, total.native.values, total.node.scratch, total.divisor)
            return
        total.native.add_up(self._rows, self._padded, total.node.scratch, total.divisor)
        for target, source in self._taken:
            target[:] = source


class Staged(Entry):
    """A piece of numbers that lie elsewhere: of each chunk the same segment, so that each owner has its share."""

    def __init__(self, total: "NodeSum", segments: list[slice], length: int):
        super().__init__(total)
        self._segments, self._length = segments, length

    def may_arrive(self) -> bool:
        node = self.sum.node
        self._stage = node.num_staged % NUM_STAGES
        return node.board.reached(DONE, node.last_staged[self._stage])

    def arrive(self) -> None:
        node, values = self.sum.node, self.sum.native.values
        node.num_staged += 1
        node.last_staged[self._stage] = self.number
        stages = node.stage_views(self._stage, values.dtype)
        places = [slice(i * self._length, i * self._length + s.stop - s.start) for i, s in enumerate(self._segments)]
        for segment, place in zip(self._segments, places):
            np.copyto(stages[node.rank][place], values[segment])
        own = [stage[places[node.rank]] for stage in stages]
        self._shares = [*own[node.rank + 1 :], *own[: node.rank + 1]]
        self._sums = [stage[place] for stage, place in zip(stages, places)]

    def reduce(self) -> None:
        """The own segment, where it was copied to."""
        total = self.sum
        if total.node.across is not None:
            self._crossing = Crossing(total, self._shares)
            return
        for block in blocks(len(self._shares[-1]), total.native.itemsize):
            shares = [share[block] for share in self._shares]
            total.native.add_up(shares, shares[-1], total.node.scratch, total.divisor)

    def has_crossed(self) -> bool:
        return self._crossing.is_done()

    def finish(self) -> None:
        values = self.sum.native.values
        for segment, share in zip(self._segments, self._sums):
            np.copyto(values[segment], share)
        del self._shares, self._sums
        self._crossing = None


def entries_of(total: "NodeSum") -> list:
    """How the numbers are summed up: every rank decides the same, or the stamps differ."""
    node, native = total.node, total.native
    nbytes = len(native) * native.itemsize
    if nbytes <= FLAT_BYTES and node.across is None:
        return [Flat(total)]
    place = node.locate(native.values)
    if place is not None:
        return [InPlace(total, *place)]
    chunks = split_evenly(len(native), node.size)
    most = node.stage_bytes // node.size // native.itemsize
    num_pieces = max(1, -(-len(chunks[0]) // most))
    cut = [split_evenly(len(chunk), num_pieces) for chunk in chunks]
    pieces = [
        [slice(c.start + p[k].start, c.start + p[k].stop) for c, p in zip(chunks, cut)] for k in range(num_pieces)
    ]
    return [Staged(total, piece, most) for piece in pieces]
