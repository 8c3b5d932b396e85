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


def build_with_tables(
    factory: Callable[[], nn.Module], prefix: str, names: set[str]
) -> tuple[nn.Module, dict[str, Lookup]]:
    """The layer of `factory` with a Lookup in place of each nn.Embedding whose weight is named, and these by name.

    A table's own weight is never written to, so one of any size costs nothing. Where the layer has other embeddings,
    it is built twice: to see which of them are tables, then with the values that all others are to have. ValueError for
    what cannot be a table.
    """
    state = torch.get_rng_state()
    with _leaving_out(lambda number: True) as left_out:
        layer = factory()
    if not isinstance(layer, nn.Module):
        return layer, {}
    found = _find(layer, prefix, names)
    are_tables = [module in found for module in left_out]
    if not all(are_tables):
        torch.set_rng_state(state)
        with _leaving_out(lambda number: are_tables[number]):
            layer = factory()
        found = _find(layer, prefix, names)
    lookups = {}
    for module, (name, places) in found.items():
        lookups[name] = Lookup(name, module)
        for place in places:
            parent, _, last = place.rpartition(".")
            setattr(layer.get_submodule(parent), last, lookups[name])
    return layer, lookups


@contextmanager
def _leaving_out(chosen: Callable[[int], bool]) -> Iterator[list[nn.Embedding]]:
    """Inside, those of the nn.Embeddings that get first values, counted as they do, are left without. All of them."""
    reset, modules = nn.Embedding.reset_parameters, []

    def leave_out(self: nn.Embedding) -> None:
        modules.append(self)
        if not chosen(len(modules) - 1):
            reset(self)

    nn.Embedding.reset_parameters = leave_out
    try:
        yield modules
    finally:
        nn.Embedding.reset_parameters = reset


def _find(layer: nn.Module, prefix: str, names: set[str]) -> dict[nn.Module, tuple[str, list[str]]]:
    """The embeddings that are tables: by which name, and all places where the layer has them."""
    places: dict[nn.Module, list[str]] = {}
    for place, module in layer.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding):
            places.setdefault(module, []).append(place)
    found = {}
    start = f"{prefix}." if prefix else ""
    for module, inside in places.items():
        own = [f"{place}.weight" if place else "weight" for place in inside]
        name = next((start + each for each in own if start + each in names), None)
        if name is None:
            continue
        _check(name, module)
        if "" in inside:
            raise ValueError(f"--task: tables() names {name}, which is a layer itself; put it inside a module")
        for other, parameter in layer.named_parameters(remove_duplicate=False):
            if parameter is module.weight and other not in own:
                raise ValueError(f"--task: tables() names {name}, which is {other} too; a table cannot be tied")
        found[module] = name, inside
    return found


def _check(name: str, module: nn.Embedding) -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ValueError(f"--task: tables() names {name}, whose {option} has no meaning for rows of a table")
