"""What `tune` measured on ranks like these: read by one rank, told to all, held by their mesh."""

import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from hpctrain.comm.environment import library_name
from hpctrain.comm.group import Group
from hpctrain.comm.ring import Ring
from hpctrain.plan.tuning import CURE, Place, Tuning, parse

MOST_BYTES = 1 << 20  # of a file


def read_tuning(path: str | os.PathLike, name: str = "tuning") -> Tuning:
    """ValueError, one line with `name`, the file and the key, for a file that cannot be used."""
    try:
        return parse(_text_of(Path(path)))
    except OSError as error:
        fault = f"{error.strerror or error}; {CURE}"
    except ValueError as error:
        fault = str(error)
    raise ValueError(f"{name} {os.fspath(path)}: {fault}")


def shared_tuning(group: Group, tuning: Tuning | str | os.PathLike | None) -> Tuning:
    """A tuning, the file of one, which rank 0 reads, or None: what is built in; rank 0's on all ranks.

    ValueError on all ranks for a file that cannot be used, or where some give one and others None. Collective.
    """
    given = np.array([tuning is not None], np.int32)
    if group.size > 1:
        group.ring.one_shot(given, "tuning").start().wait()
    if given[0] == 0:
        return Tuning()
    if given[0] < group.size:
        raise ValueError(f"tuning: {given[0]} of {group.size} ranks give one; give it on all ranks, or on none")
    told = group.broadcast_json(_told(tuning) if group.rank == 0 else None)
    if isinstance(told, str):
        raise ValueError(told)
    return Tuning.of(told)


def place_of(ring: Ring) -> Place:
    """Of a ring that has been asked for its nodes; of one rank alone there is no MPI."""
    each = ring.node_sizes[0] if len(set(ring.node_sizes)) == 1 else None
    return Place(ring.size, len(ring.node_sizes), each, _library() if ring.size > 1 else "none")


def note_other_place(tuning: Tuning, ring: Ring) -> None:
    """On the first rank: one line where it was measured on other ranks, nodes or another MPI than the ring has."""
    if tuning.place is None or ring.size == 1 or ring.rank != 0:
        return
    if (here := place_of(ring)) != tuning.place:
        print(
            f"note: the tuning was measured on {tuning.place}, and here sums go over {here}; other constants may be"
            " better",
            file=sys.stderr,
        )


def _told(tuning: Tuning | str | os.PathLike) -> dict | str:
    try:
        return asdict(tuning if isinstance(tuning, Tuning) else read_tuning(tuning))
    except (ValueError, TypeError) as error:  # TypeError: no file's name at all
        return str(error)


def _text_of(path: Path) -> str:
    """OSError or ValueError where there is none."""
    if path.exists() and not path.is_file():
        raise ValueError(f"not a file; {CURE}")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES} bytes, so `tune` did not write this; {CURE}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"not a whole file of JSON; {CURE}") from None


def _library() -> str:
    from mpi4py import MPI

    return library_name(MPI.Get_library_version())
