"""Values that a worker has asked for: a part from each server, put together when all are there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hpctrain.comm.progress import take_back


@dataclass
class Part:
    """What one server sends: into `memory`, in this order. `chosen`: which rows of the pull it is."""

    requests: list[Any] | None  # None: only the answer's header tells what will come
    memory: list[Any]
    chosen: torch.Tensor | None = None
    answered: bool = False

    def poll(self) -> bool:
        return self.answered and self.requests is not None and all(request.Test() for request in self.requests)


@dataclass
class Pull:
    """Values on their way; `wait` for them. `versions`: of each server, the updates that its answer held.

    `table` -1 is the dense arena. Where the workers step, `values` are a gradient: `items` and `loss` are those of its
    round, `ids` its rows, `touched` says which segments of the arena it has.
    """

    table: int
    poll: Callable[[], Any]
    wait_for: Callable[[Callable[[], bool]], None]
    values: torch.Tensor
    ids: torch.Tensor | None = None
    items: float = 0.0
    loss: float = 0.0
    touched: list[bool] | None = None
    versions: dict[int, int] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)  # by server: what is still to come
    _masks: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return not self.parts

    def wait(self) -> "Pull":
        """Returns itself when all is there. RankFailed where a server refused."""
        if self.parts:
            self.wait_for(lambda: self.poll() or self.done)
        return self

    def take_back(self) -> None:
        """Waits for what is on its way, and expects nothing else any more."""
        parts = list(self.parts.values())
        take_back([request for part in parts if not part.answered for request in part.requests or ()])
        self.wait_for(lambda: all(part.poll() for part in parts if part.answered and part.requests))

    def look(self) -> None:
        """Takes the parts that are whole."""
        for server, part in list(self.parts.items()):
            if not part.poll():
                continue
            if part.chosen is not None:
                _put(self.values, part.chosen, part.memory[0])
            elif self.table >= 0 and len(part.memory) == 2:
                ids, rows = part.memory
                self.ids, self.values = torch.cat([self.ids, ids]), torch.cat([self.values, rows])
            elif self.table < 0 and len(part.memory) == 2:
                self._masks[server] = part.memory[0]
            del self.parts[server]
        if self.done and self._masks:
            masks = [self._masks[server] for server in sorted(self._masks)]
            self.touched = np.concatenate(masks).astype(bool).tolist()


def copy_rows(values: torch.Tensor, chosen: torch.Tensor | None, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Of these rows, None: of all, in what `empty(*shape, dtype=)` gives. By NumPy, which copies row by row."""
    length = len(values) if chosen is None else len(chosen)
    copy = empty(length, *values.shape[1:], dtype=values.dtype)
    if chosen is None:
        return copy.copy_(values)
    values.numpy().take(chosen.numpy(), axis=0, out=copy.numpy(), mode="clip")
    return copy


def _put(values: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor) -> None:
    """Each row as one item: NumPy then copies row by row, not number by number."""
    whole = f"V{rows.shape[1] * rows.itemsize}"
    values.numpy().view(whole)[chosen.numpy(), 0] = rows.numpy().view(whole)[:, 0]
