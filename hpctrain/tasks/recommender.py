"""A recommender as a list of layers: two tables of embeddings, and a tower that predicts a rating.

The product of the two embeddings beside them is what a factorisation of the ratings would sum up (Koren et al., Matrix
Factorization Techniques for Recommender Systems, 2009; He et al., Neural Collaborative Filtering, 2017), so the tower
need not learn to multiply. Nearly all weights are in the tables and nearly all arithmetic in the tower.

Ratings are predicted as a distance from their mean over the training rows. It belongs to the data and is not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


def layer_factories(
    num_users: int, num_items: int, width: int, hidden: int, mean: float
) -> list[Callable[[], nn.Module]]:
    """Factories of 3 layers: int64 (batch, candidates, 2) of user and item -> ratings (batch, candidates)."""
    return [
        partial(Tables, num_users, num_items, width),
        partial(Hidden, 3 * width, hidden),
        partial(Rating, hidden, mean),
    ]


class Tables(nn.Module):
    """int64 (batch, candidates, 2) -> (batch, candidates, 3 * width): user, item, and their product."""

    def __init__(self, num_users: int, num_items: int, width: int):
        super().__init__()
        self.users, self.items = nn.Embedding(num_users, width), nn.Embedding(num_items, width)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.users(pairs[..., 0]), self.items(pairs[..., 1])
        return torch.cat([user, item, user * item], dim=-1)


class Hidden(nn.Module):
    """Linear and GELU: (batch, candidates, width) -> (batch, candidates, hidden)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x))


class Rating(nn.Module):
    """(batch, candidates, hidden) -> ratings (batch, candidates), in the dtype of the weights.

    bfloat16 has steps of 1/64 at a rating of 3, so `mean` is added in the dtype of the weights.
    """

    def __init__(self, hidden: int, mean: float):
        super().__init__()
        self.linear, self.mean = nn.Linear(hidden, 1), mean

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1).to(self.linear.weight.dtype) + self.mean


def squared_error_sum(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum over all items with a finite target, a scalar, and their number; both tensors (batch, candidates)."""
    rated = targets.isfinite()
    return (outputs - targets).masked_fill(~rated, 0.0).square().sum(), int(rated.sum())


def hits(outputs: Tensor, targets: Tensor, best: int) -> tuple[float, int]:
    """In how many rows the first item is among the `best` of it and those with target NaN; and the number of rows.

    Equal predictions count as better than that of the first item, NaN among them; where its own is NaN there is no
    hit. Rows without a target of NaN leave no choice, and do not count.
    """
    own, others = outputs[:, :1], targets.isnan()
    ahead = (others & ~(outputs < own)).sum(1)
    counted = others.any(1)
    hit = counted & (ahead < best) & ~own.squeeze(1).isnan()
    return float(hit.sum()), int(counted.sum())
