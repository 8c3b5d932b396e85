"""A launch is made once, and so is its failure: else each of many tests would wait for the same end again."""

from __future__ import annotations

import functools
from collections.abc import Callable


def remembered(make: Callable) -> Callable:
    """`make`, called once for each of its arguments; what it raised is raised again."""

    @functools.cache
    def made(*arguments):
        try:
            return make(*arguments), None
        except Exception as error:
            return None, error

    def call(*arguments):
        result, error = made(*arguments)
        if error is not None:
            raise AssertionError(f"the launch of {arguments} failed: {error}")
        return result

    return call
