"""What a worker pushed, and what an update was made of."""

from dataclasses import dataclass, field

import torch


class Refused(ValueError):
    """A request that cannot be served: one line that names worker, clock and table. Nothing has changed here."""


@dataclass
class Iteration:
    """What a worker pushed at one clock: sums over its items."""

    clock: int
    items: float = 0.0
    loss: float = 0.0
    lr: float = 0.0
    lag: int = 0  # updates of others since the worker read
    dense: torch.Tensor | None = None
    touched: list[bool] | None = None  # by segment; None: all
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # ids and sums by table


@dataclass
class Gradient:
    """What one update was made of, for workers that step by themselves."""

    items: float = 0.0
    loss: float = 0.0
    dense: torch.Tensor | None = None
    touched: list[bool] | None = None
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
