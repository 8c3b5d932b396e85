"""Embeddings whose rows live in a table: while a batch is computed, the layer holds only those that it looks up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional


class Lookup(nn.Module):
    """Takes the place of the nn.Embedding `name`. `held` ids (ascending) and their `rows` are set for each step.

    Outside training rows are fetched where they are asked for: `fetch(ids)` gives those of distinct ids.
    """

    def __init__(self, name: str, embedding: nn.Embedding):
        super().__init__()
        self.name, self.num_embeddings, self.embedding_dim = name, embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.fetch: Callable[[Tensor], Tensor] | None = None
        self.held: Tensor | None = None
        self.rows: Tensor | None = None

    def hold(self, ids: Tensor, rows: Tensor) -> None:
        """The step's rows: distinct ascending `ids` (n,) and `rows` (n, width), whose gradient is gathered."""
        self.held, self.rows = ids, rows.requires_grad_()

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of int64 `ids` of any shape: (*ids.shape, width)."""
        if self.training:
            held, rows = self.held, self.rows
        else:
            held = ids.unique()
            rows = self.fetch(held)
        flat = ids.reshape(-1).contiguous()
        places = torch.searchsorted(held, flat).clamp_(max=max(0, len(held) - 1))
        if len(flat) and not (len(held) and torch.equal(held[places], flat)):
            missing = next(each for each in flat.tolist() if each not in set(held.tolist()))
            raise ValueError(f"table {self.name}: looks up id {missing}, which ids() of tables() did not name")
        padding = self._padding(held)
        return functional.embedding(places, rows, padding).view(*ids.shape, self.embedding_dim)

    def _padding(self, held: Tensor) -> int | None:
        """Where the row that gets no gradient is among those held."""
        if self.padding_idx is None:
            return None
        place = int(torch.searchsorted(held, self.padding_idx))
        return place if place < len(held) and int(held[place]) == self.padding_idx else None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, a table"


@contextmanager
def without_values() -> Iterator[None]:
    """Inside, nn.Embedding gets memory that nobody writes to, so a table of any size costs nothing to leave out."""
    reset = nn.Embedding.reset_parameters
    nn.Embedding.reset_parameters = lambda self: None
    try:
        yield
    finally:
        nn.Embedding.reset_parameters = reset


def replace_tables(layer: nn.Module, prefix: str, names: set[str]) -> dict[str, Lookup]:
    """Puts a Lookup in place of each nn.Embedding whose weight is named; by name. ValueError for what is no table.

    All other embeddings of a layer built `without_values` get theirs.
    """
    found: dict[str, Lookup] = {}
    for inside, module in list(layer.named_modules()):
        name = f"{prefix}.{inside}.weight" if inside else f"{prefix}.weight"
        if not isinstance(module, nn.Embedding):
            continue
        if name not in names:
            module.reset_parameters()
            continue
        _check(name, module)
        if not inside:
            raise ValueError(f"--task: tables() names {name}, which is a layer itself; put it inside a module")
        parent, _, last = inside.rpartition(".")
        found[name] = Lookup(name, module)
        setattr(layer.get_submodule(parent), last, found[name])
    return found


def _check(name: str, module: nn.Embedding) -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ValueError(f"--task: tables() names {name}, whose {option} has no meaning for rows of a table")
