"""The ways of summing up in shared memory, as entries that a Node takes through its steps.

- InPlace: the numbers lie in a window. Each rank sums up its own chunk out of all parts and writes the result into all.
- Staged: they lie elsewhere. Pieces of them are copied into a window, summed as above, and copied out.
- Flat: they are few. Each rank copies them into a window, and sums up everything for itself.

All add chunk c in the order c + 1, c + 2, ..., c of ranks, as the ring does: the same bits.
"""

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.comm.board import DONE
from hpctrain.comm.node import BLOCK_BYTES, FLAT_BYTES, NUM_FLAT, NUM_STAGES
from hpctrain.plan.grid import piece_of, split_evenly

if TYPE_CHECKING:
    from hpctrain.comm.node_sum import NodeSum


class InPlace:
    """Numbers in a window, at the same offset on all ranks."""

    is_alone = False  # whether this rank's result needs only that all have arrived

    def __init__(self, total: "NodeSum", number: int, offset: int):
        self.sum, self.place = total, f"{number} {offset}"
        window = total.node.windows[number]
        native, rank, size = total.native, total.node.rank, total.node.size
        nbytes = len(native) * native.itemsize
        parts = [part[offset : offset + nbytes].view(native.values.dtype) for part in window.parts]
        chunk = split_evenly(len(native), size)[rank]
        others = [parts[(rank + step) % size] for step in range(1, size)]
        self._blocks = [
            (parts[rank][block], [other[block] for other in others]) for block in blocks(chunk, native.itemsize)
        ]

    def has_room(self) -> bool:
        return True

    def arrive(self) -> None:
        """The numbers are where they must be."""

    def reduce(self) -> None:
        """The own chunk, in all parts."""
        total = self.sum
        add_up, scratch, divisor = total.native.add_up, total.node.scratch, total.divisor
        for own, others in self._blocks:
            add_up([*others, own], own, scratch, divisor)
            for other in others:
                np.copyto(other, own)

    def finish(self) -> None:
        """The others wrote their chunks into this rank's part."""


class Flat:
    """Few numbers, from anywhere.

    They are laid out so that one addition after another, over all numbers at once, adds each chunk in its order: what
    comes p-th in the sum of chunk c, which is rank c + 1 + p's, lies in row p. Chunks are rounded up to one length.
    Of two ranks the order does not matter, and each has a row.
    """

    is_alone, place = True, ""

    def __init__(self, total: "NodeSum"):
        self.sum = total
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

    def has_room(self) -> bool:
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

    def finish(self) -> None:
        """Nothing is left to take over."""


class Staged:
    """A piece of numbers that lie elsewhere: of each chunk the same segment, so that each owner has its share."""

    is_alone, place = False, ""

    def __init__(self, total: "NodeSum", segments: list[slice], length: int):
        self.sum, self._segments, self._length = total, segments, length

    def has_room(self) -> bool:
        """Whether all have read what lay there before."""
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
        self._own = [stage[places[node.rank]] for stage in stages]
        self._sums = [stage[place] for stage, place in zip(stages, places)]

    def reduce(self) -> None:
        """The own segment, where it was copied to."""
        total, rank, own = self.sum, self.sum.node.rank, self._own
        for block in blocks(range(len(own[rank])), total.native.itemsize):
            shares = [share[block] for share in (*own[rank + 1 :], *own[: rank + 1])]
            total.native.add_up(shares, shares[-1], total.node.scratch, total.divisor)

    def finish(self) -> None:
        values = self.sum.native.values
        for segment, share in zip(self._segments, self._sums):
            np.copyto(values[segment], share)
        del self._own, self._sums


def entries_of(total: "NodeSum") -> list:
    """How the numbers are summed up: every rank decides the same, or the stamps differ."""
    node, native = total.node, total.native
    nbytes = len(native) * native.itemsize
    if nbytes <= FLAT_BYTES:
        return [Flat(total)]
    place = node.locate(native.values)
    if place is not None:
        return [InPlace(total, *place)]
    chunks = split_evenly(len(native), node.size)
    most = node.stage_bytes // node.size // native.itemsize
    num_pieces = -(-len(chunks[0]) // most)
    cut = [split_evenly(len(chunk), num_pieces) for chunk in chunks]
    pieces = [
        [slice(c.start + p[k].start, c.start + p[k].stop) for c, p in zip(chunks, cut)] for k in range(num_pieces)
    ]
    return [Staged(total, piece, most) for piece in pieces]


def blocks(span: range, itemsize: int) -> list[slice]:
    """`span` in parts of at most BLOCK_BYTES."""
    length = BLOCK_BYTES // itemsize
    return [slice(begin, min(begin + length, span.stop)) for begin in range(span.start, span.stop, length)]
