"""Servers share the arena out: every element once, borders on cache lines, names kept."""

import pytest

from hpctrain.plan.sharding import ALIGNMENT, Segment, cut_dense


@pytest.mark.parametrize("num_servers", (1, 2, 3, 7))
@pytest.mark.parametrize("sizes", ([5], [16, 16], [100, 3, 0, 77, 1], [1000, 1], []))
def test_every_element_of_a_parameter_lies_on_one_server(sizes, num_servers):
    segments, place = [], 0
    for number, size in enumerate(sizes):
        segments.append(Segment(f"p{number}", place, place + size))
        place += -(-size // ALIGNMENT) * ALIGNMENT
    parts = cut_dense(segments, place, num_servers)
    assert len(parts) == num_servers and parts[0].start == 0 and parts[-1].stop == place
    assert all(one.stop == other.start for one, other in zip(parts, parts[1:]))
    assert all(part.start % ALIGNMENT == 0 or part.start == place for part in parts)
    found = {name: [] for name, _, _ in segments}
    for part in parts:
        for name, start, stop in part.segments:
            assert part.start <= start < stop <= part.stop
            found[name] += range(start, stop)
    assert found == {name: list(range(start, stop)) for name, start, stop in segments}


def test_parts_are_of_about_the_same_size():
    lengths = [len(part) for part in cut_dense([Segment("a", 0, 1000)], 1000, 3)]
    assert max(lengths) - min(lengths) <= 2 * ALIGNMENT
