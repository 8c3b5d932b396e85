"""Parameters with so many rows that no rank needs to hold them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Table:
    """How a table of embeddings is used: which of its rows a batch needs, and how a new row begins.

    A task's `tables()` gives {parameter name: Table}. Each name is that of the weight of a plain nn.Embedding, by its
    global name, "layers.0.users.weight"; its rows lie on servers or in a local table, and are created row by row when
    they are first touched. `ids` maps the inputs of a batch to the int64 ids that it looks up, of any shape, with
    repetitions. A row that was never seen before is drawn from a normal distribution of mean 0 and deviation `std`.
    """

    ids: Callable[[Any], Tensor]
    std: float = 1.0
