"""Which tests a part of the suite takes, asked of pytest itself: the part's paths, its -m, its -k, and enough ranks."""

from __future__ import annotations

import pytest
from _pytest.mark import KeywordMatcher, MarkMatcher
from _pytest.mark.expression import Expression

COLLECTED = pytest.StashKey[list]()  # in config.stash: all tests that were found, before any are taken away


def takes(part, item) -> bool:
    """Whether `part`, a suite.Part, runs the test `item` (which may skip itself there all the same)."""
    words, marker = dict(zip(part.arguments, part.arguments[1:])), item.get_closest_marker("mpi")
    left_out = [word.partition("=")[2] for word in part.arguments if word.startswith("--deselect=")]
    return (
        any(path == "tests" or item.nodeid.startswith((f"{path}/", f"{path}::")) for path in part.paths)
        and not any(item.nodeid.startswith(path) for path in left_out)
        and _holds(words.get("-m"), MarkMatcher.from_markers(item.iter_markers()))
        and _holds(words.get("-k"), KeywordMatcher.from_item(item))
        and (not part.ranks or (marker.kwargs.get("min_size") or 1) <= part.ranks)
    )


def _holds(expression: str | None, matcher) -> bool:
    return expression is None or Expression.compile(expression).evaluate(matcher)
