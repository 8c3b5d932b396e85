"""A small recommender with everything that tables can have: two of them, repeated ids, rows that weigh nothing."""

from dataclasses import dataclass

import torch
from torch import nn

from hpctrain.tasks.table import Table

NUM_ROWS, USERS, ITEMS, WIDTH = 37, 11, 23, 4


class Pairs(nn.Module):
    """int64 (batch, 3): a user and two items -> (batch, 2 * WIDTH)."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)

    def forward(self, ids):
        items = self.items(ids[:, 1:])
        return torch.cat([self.users(ids[:, 0]), items.sum(1)], dim=1)


@dataclass
class Recommender:
    """Predicts numbers; every fifth row has none. `padded`: row 0 of the items is never trained."""

    padded: bool = False
    name = "recommender"

    def layers(self):
        return [self.pairs, lambda: nn.Sequential(nn.Linear(2 * WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))]

    def pairs(self):
        layer = Pairs()
        if self.padded:
            layer.items = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        return layer

    def tables(self):
        return {
            "layers.0.users.weight": Table(lambda ids: ids[:, 0], 0.3),
            "layers.0.items.weight": Table(lambda ids: ids[:, 1:], 0.5),
        }

    def loss(self, outputs, targets):
        outputs = outputs.sum(1, keepdim=True) if outputs.shape[1] > 1 else outputs
        counted = ~targets.isnan()
        return (outputs[:, 0] - targets)[counted].square().sum(), int(counted.sum())

    def dataset(self, split):
        generator = torch.Generator().manual_seed(3 if split == "train" else 4)
        users = torch.randint(USERS, (NUM_ROWS, 1), generator=generator)
        items = torch.randint(ITEMS, (NUM_ROWS, 2), generator=generator)
        items[::4, 1] = items[::4, 0]
        targets = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
        targets[::5] = torch.nan
        return list(zip(torch.cat([users, items], dim=1), targets))


@dataclass
class TablesAlone(Recommender):
    """No parameter but the tables."""

    def layers(self):
        return [self.pairs]
