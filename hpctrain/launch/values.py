"""What the commands of this package share on their command lines."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable


def at_least(minimum: int) -> Callable[[str], int]:
    """Reads a whole number, not below `minimum`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise ArgumentTypeError(f"expected a whole number >= {minimum}, got {text!r}")
        return int(text)

    return read


def wrong_start(command: str, world) -> int:
    """Of a command that many ranks were given; returns 2."""
    if world.rank == 0:
        print(f"hpctrain {command}: start it once, without mpirun or srun", file=sys.stderr)
    return 2
