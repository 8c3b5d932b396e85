"""Which server holds what: the dense parameters in ranges of one arena, the rows of a table by their id."""

from collections.abc import Iterable
from typing import NamedTuple

from hpctrain.plan.grid import split_evenly

ALIGNMENT = 32  # elements: borders between servers lie on whole cache lines, also of 16-bit numbers


class Segment(NamedTuple):
    """Elements [start, stop) of the arena that belong to a parameter, or to a part of it."""

    name: str
    start: int
    stop: int


class DensePart(NamedTuple):
    """What one server holds of the arena: elements [start, stop), in `segments`; gaps between them are padding."""

    start: int
    stop: int
    segments: list[Segment]

    def __len__(self):
        return self.stop - self.start


def cut_dense(segments: Iterable[Segment], num_elements: int, num_servers: int) -> list[DensePart]:
    """A part of about the same size for each server. A parameter may lie on several of them."""
    blocks, parts = -(-num_elements // ALIGNMENT), []
    segments = list(segments)
    for piece in split_evenly(blocks, num_servers):
        start, stop = (min(num_elements, border * ALIGNMENT) for border in (piece.start, piece.stop))
        parts.append(DensePart(start, stop, within(segments, start, stop)))
    return parts


def within(segments: Iterable[Segment], start: int, stop: int) -> list[Segment]:
    """What of the segments lies in [start, stop); those of which nothing does are left out."""
    inside = (Segment(each.name, max(each.start, start), min(each.stop, stop)) for each in segments)
    return [each for each in inside if each.start < each.stop]
