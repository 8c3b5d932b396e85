"""The task `ratings`: a recommender with two tables of embeddings learns how users rate items.

The built-in ratings are 100,004 of MovieLens. A recommender is used on what comes next, so the latest rating of each
user is held out and the others are trained on. The yardsticks are the mean rating, and candidates in random order.
torch comes in with the model only, so that options and data are checked without it.

Ratings are read once for each node and kept in the cache as arrays, with users and items numbered from 0 in the order
of their ids: text is slow to read, and pandas, which the built-in ratings come with, slow to load. A row is read from
there when it is asked for, so that no rank holds the ratings in memory.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpctrain.plan.seeds import derive_seed
from hpctrain.tasks.protocol import check_option
from hpctrain.tasks.ratings_files import Columns, built_in_file, divide, find_file, read_built_in, read_file
from hpctrain.tasks.storage import FileArray, Stamp, cached, open_npy, stamp
from hpctrain.tasks.table import Table

if TYPE_CHECKING:
    from torch import Tensor, nn

BEST = 10  # predictions of a row, among which a hit is
STD = 0.1  # of new embeddings
FILLER = math.inf  # the target of a candidate that fills up a row and counts for nothing
KEPT_AS = 1  # changes where the arrays in the cache do


class Source(NamedTuple):
    """Ratings in the cache; users and items are numbered from 0 in the order of their ids.

    `train_pairs` and `eval_pairs` are int64 (rows, 2) of user and item, `train_ratings` and `eval_ratings` float32.
    `rated`: int64, the items of user 0 in ascending order, of user 1, ...; those of user u lie from `starts[u]` to
    `starts[u + 1]`. `user_ids` and `item_ids`: int64, the ids of the data.
    """

    train_pairs: FileArray
    train_ratings: FileArray
    eval_pairs: FileArray
    eval_ratings: FileArray
    rated: FileArray
    starts: FileArray
    user_ids: FileArray
    item_ids: FileArray


class TrainRows:
    """A map-style data set: item i is (pair, rating), int64 (1, 2) of user and item, and float32 (1,)."""

    def __init__(self, source: Source):
        self.pairs, self.ratings = source.train_pairs, source.train_ratings

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import torch  # here, because the command line reads its errors from this module without torch

        if not 0 <= index < len(self):
            raise IndexError(f"rating {index} of {len(self)}")
        pair, rating = (array.read(index, index + 1) for array in (self.pairs, self.ratings))
        return torch.from_numpy(pair), torch.from_numpy(rating)


class HeldOutRows:
    """A map-style data set: item i is (candidates, targets), int64 (1 + num_negatives, 2) and float32 of that many.

    The first candidate is what a user rated last, with the rating as target; the others are items that this user never
    rated, drawn in the same way whenever they are asked for, with NaN as target. Where a user left fewer items
    unrated, the row is filled up with the first candidate and infinite targets, which count for nothing.
    """

    def __init__(self, source: Source, num_negatives: int):
        self._source, self._num_negatives = source, num_negatives

    def __len__(self) -> int:
        return len(self._source.eval_pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import torch

        if not 0 <= index < len(self):
            raise IndexError(f"rating {index} of {len(self)}")
        candidates = self._source.eval_pairs.read(index, index + 1).repeat(1 + self._num_negatives, axis=0)
        targets = np.full(len(candidates), FILLER, np.float32)
        targets[:1] = self._source.eval_ratings.read(index, index + 1)
        others = self._negatives(int(candidates[0, 0]))
        candidates[1 : 1 + len(others), 1] = others
        targets[1 : 1 + len(others)] = np.nan
        return torch.from_numpy(candidates), torch.from_numpy(targets)

    def num_others(self) -> np.ndarray:
        """For each row, how many candidates have no rating: int64."""
        starts, users = self._source.starts, self._source.eval_pairs.read(0, len(self))[:, 0]
        unrated = len(self._source.item_ids) - np.diff(starts.read(0, len(starts)))[users]
        return np.minimum(unrated, self._num_negatives)

    def _negatives(self, user: int) -> np.ndarray:
        """Different items that the user never rated, num_negatives or all there are: int64, in random order."""
        rated = self._source.rated.read(*self._source.starts.read(user, user + 2).tolist())
        unrated = len(self._source.item_ids) - len(rated)
        generator = np.random.Generator(np.random.PCG64(derive_seed("negatives", user)))
        places = generator.choice(unrated, min(unrated, self._num_negatives), replace=False)
        return places + np.searchsorted(rated - np.arange(len(rated)), places, side="right")


@dataclass(frozen=True)
class Ratings:
    """A recommender and the ratings it learns from.

    `data`: a file of ratings (ratings.csv, ratings.dat or u.data of MovieLens, or alike), a folder with one, or None
    for the built-in ones. `width`: of an embedding; `hidden`: of the tower; `negatives`: items without a rating in a
    held-out row; `users` and `items`: rows of the tables, None for as many as there are. ValueError names the option
    that is out of range, or --data; what is wrong inside a file is found by prepare().
    """

    width: int = 16
    hidden: int = 32
    negatives: int = 99
    users: int | None = None
    items: int | None = None
    data: str | None = None

    def __post_init__(self):
        for option in ("width", "hidden", "negatives"):
            check_option(option, getattr(self, option), getattr(self, option) >= 1, "at least 1")
        assert self._file

    @cached_property
    def _file(self) -> Path:
        return built_in_file() if self.data is None else find_file(self.data)

    @cached_property
    def _source(self) -> Source:
        read = read_built_in if self.data is None else partial(read_file, self._file, self.data)
        source = open_source(self._file, read, "--data" if self.data is None else f"--data {self.data}")
        for option, ids in (("users", source.user_ids), ("items", source.item_ids)):
            size = getattr(self, option)
            if size is not None:
                check_option(option, size, size >= len(ids), f"at least {len(ids)}, as many as there are in the data")
        return source

    @cached_property
    def _mean(self) -> float:
        """Of the ratings to train on."""
        ratings = self._source.train_ratings
        return float(sum(piece.sum(dtype=np.float64) for piece in ratings.pieces()) / len(ratings))

    def prepare(self) -> None:
        """Reads the ratings into the cache. ValueError where they cannot be used, or a table is too small for them."""
        assert self._source

    def layers(self) -> list[Callable[[], nn.Module]]:
        """3 factories: int64 (batch, candidates, 2) of user and item in, predicted ratings (batch, candidates) out."""
        from hpctrain.tasks import recommender

        num_users, num_items = self.users or len(self._source.user_ids), self.items or len(self._source.item_ids)
        return recommender.layer_factories(num_users, num_items, self.width, self.hidden, self._mean)

    def tables(self) -> dict[str, Table]:
        """The embeddings of users and items, by the names of their weights."""
        return {
            "layers.0.users.weight": Table(lambda pairs: pairs[..., 0], STD),
            "layers.0.items.weight": Table(lambda pairs: pairs[..., 1], STD),
        }

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Squared errors: their sum over all items that have a rating, and the number of those."""
        from hpctrain.tasks import recommender

        return recommender.squared_error_sum(outputs, targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        """`loss` as (sum of squared errors, number of ratings); `hit_rate_at_10` as (hits, rows with a choice).

        A hit is a row whose rated item is among the 10 best predicted; equal predictions count against it.
        """
        from hpctrain.tasks import recommender

        total, count = self.loss(outputs, targets)
        return {"loss": (total.item(), count), "hit_rate_at_10": recommender.hits(outputs, targets, BEST)}

    def figures(self, means: dict[str, float]) -> dict[str, float]:
        """What is shown of the means of the metrics over all rows: `rmse`, in stars, instead of the loss."""
        shown = {name: value for name, value in means.items() if name != "loss"}
        return {"rmse": math.sqrt(means["loss"]), **shown} if "loss" in means else shown

    def dataset(self, split: str) -> TrainRows | HeldOutRows:
        """Rows of `split` "train", one for each rating, or "eval", one for each user with 2 ratings or more."""
        assert split in ("train", "eval"), split
        return TrainRows(self._source) if split == "train" else HeldOutRows(self._source, self.negatives)

    def baseline(self) -> dict[str, float]:
        """`rmse` of the mean training rating on the held-out ones, `hit_rate_at_10` of candidates in random order."""
        ratings, others = self._source.eval_ratings, self.dataset("eval").num_others()
        errors = sum(((piece.astype(np.float64) - self._mean) ** 2).sum() for piece in ratings.pieces())
        baseline = {"rmse": math.sqrt(errors / len(ratings))}
        if others.any():
            baseline["hit_rate_at_10"] = float(np.minimum(BEST / (1 + others[others > 0]), 1).mean())
        return baseline

    def data_sha256(self) -> str:
        """Hex digest of the bytes of the file."""
        digest, name = hashlib.sha256(), "--data" if self.data is None else f"--data {self.data}"
        for piece in FileArray(self._file, np.uint8, name=name).pieces():
            digest.update(piece)
        return digest.hexdigest()

    def data_stamp(self) -> Stamp:
        """What changes when somebody changes the ratings. Nothing of them is read."""
        return stamp(self._file)


def open_source(file: Path, read: Callable[[], Columns], named: str) -> Source:
    """The ratings of `file` in the cache, into which what `read` gives is written where something is missing.

    DataError begins with `named`.
    """
    arrays = cache(lambda: divide(read(), named))
    key = f"ratings {KEPT_AS} of {os.path.abspath(file)} {stamp(file).digest}"
    made = [
        open_npy(cached(f"{key}: {name}", ".npy", lambda path, name=name: np.save(path, arrays()[name])))
        for name in Source._fields
    ]
    for array in made:
        array.name = named
    return Source(*made)
