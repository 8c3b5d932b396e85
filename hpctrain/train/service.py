"""What a parameter service is asked to do, and what it holds: told by worker 0 to all servers when it begins."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.comm.abort import RankFailed
from hpctrain.model.dense_table import DenseTable
from hpctrain.model.row_optimizers import build_row_optimizer
from hpctrain.model.tables import DTYPES, EmbeddingTable
from hpctrain.plan.sharding import DensePart, Segment, cut_dense
from hpctrain.train.optimizer import build_optimizer


@dataclass(frozen=True)
class ServiceSettings:
    """`staleness`: how far workers may run apart (infinity: as they like); 0 gathers rounds and applies them whole.

    `update`: "server" (the server steps, pulls bring weights) or "worker" (it adds up, pulls bring the gradient).
    `adapt_lr` divides the learning rate of an update by its lag (Zhang et al., IJCAI 2016). `max_rows` of each table
    on each server. `record`: keep a log of what was served and applied, in order.
    """

    staleness: float = 0
    update: str = "server"
    aggregate: str = "mean"
    optimizer: str = "sgd"
    table_optimizer: str | None = None
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    adapt_lr: bool = False
    max_rows: int | None = None
    seed: int = 0
    record: bool = False

    @property
    def gathers(self) -> bool:
        """Whether the pushes of a round are applied together."""
        return self.staleness == 0


class TableShape(NamedTuple):
    """A table of embeddings: `num_rows` of `width`, first values with deviation `std`."""

    name: str
    num_rows: int
    width: int
    std: float = 1.0


@dataclass(frozen=True)
class Description:
    """All that servers know: the settings, the dense arena cut into a part for each, and the tables."""

    settings: ServiceSettings
    dtype: str
    parts: list[DensePart] = field(default_factory=list)
    tables: list[TableShape] = field(default_factory=list)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping) -> "Description":
        parts = [
            DensePart(start, stop, [Segment(*each) for each in segments]) for start, stop, segments in told["parts"]
        ]
        tables = [TableShape(*each) for each in told["tables"]]
        return cls(ServiceSettings(**told["settings"]), told["dtype"], parts, tables)

    def name(self, table: int) -> str:
        """Of a table by its number, -1 being the dense part."""
        names = [f"table {each.name}" for each in self.tables]
        return "the dense part" if table < 0 else names[table] if table < len(names) else f"table number {table}"

    def check_same(self, other: "Description", worker: int) -> None:
        """RankFailed where worker 0 has an `other` one."""
        mine, theirs = ({**each.to_json(), **each.to_json()["settings"]} for each in (self, other))
        for name in mine.keys() - {"settings"}:
            if mine[name] != theirs[name]:
                pair = next((m, t) for m, t in zip(*_listed(mine[name], theirs[name])) if m != t)
                raise RankFailed(f"worker {worker} has other {name} than worker 0: {pair[0]}, there {pair[1]}")

    def check_push(self, rows: Mapping[int, tuple[torch.Tensor, torch.Tensor]], dense: torch.Tensor | None) -> None:
        """ValueError for what has not the service's shapes or dtype."""
        for table, (ids, sums) in rows.items():
            if not 0 <= table < len(self.tables):
                raise ValueError(f"there is no table number {table}")
            wanted = f"{(len(ids), self.tables[table].width)} {self.torch_dtype}"
            if ids.dtype != torch.int64 or ids.ndim != 1 or f"{tuple(sums.shape)} {sums.dtype}" != wanted:
                what = f"gradients {tuple(sums.shape)} {sums.dtype} for ids {tuple(ids.shape)} {ids.dtype}"
                raise ValueError(f"{self.name(table)}: {what}; {wanted} for int64 ids in one dimension would do")
        wanted = f"({sum(map(len, self.parts))},) {self.torch_dtype}"
        if dense is not None and f"{tuple(dense.shape)} {dense.dtype}" != wanted:
            raise ValueError(f"dense gradients {tuple(dense.shape)} {dense.dtype}, not {wanted}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def _listed(mine, theirs) -> tuple[list, list]:
    """Of equal lengths."""
    if not isinstance(mine, list):
        return [mine], [theirs]
    return mine + ["nothing"] * (len(theirs) - len(mine)), theirs + ["nothing"] * (len(mine) - len(theirs))


def describe(
    settings: ServiceSettings,
    dtype: torch.dtype,
    segments: Sequence[Segment],
    num_elements: int,
    tables: Sequence[TableShape],
    num_servers: int,
) -> Description:
    """`segments` of the dense arena of `num_elements`. ValueError for a table that cannot be."""
    for each in tables:
        if each.num_rows < 1 or each.width < 1 or not 0 <= each.std < math.inf:
            raise ValueError(f"table {each.name}: {each.num_rows} rows of width {each.width}, deviation {each.std}")
        if dtype not in DTYPES:
            raise ValueError(f"table {each.name}: rows of {dtype}; torch.float32 or torch.float64 would do")
    parts = cut_dense(segments, num_elements, num_servers)
    return Description(settings, str(dtype).removeprefix("torch."), parts, list(tables))


def build_tables(description: Description, server: int, num_servers: int) -> list[EmbeddingTable]:
    """The rows that one server owns: ids that leave remainder `server`. With one server and none else, all."""
    settings = description.settings
    return [
        EmbeddingTable(
            each.name,
            each.num_rows,
            each.width,
            settings.seed,
            each.std,
            build_row_optimizer(
                settings.table_optimizer or settings.optimizer, settings.momentum, settings.weight_decay
            ),
            description.torch_dtype,
            range(server, each.num_rows, num_servers),
            settings.max_rows,
            check_finite=False,  # of each push before it is taken
        )
        for each in description.tables
    ]


def build_dense(description: Description, server: int, values: torch.Tensor) -> DenseTable | None:
    """One server's part of the arena, that begins as `values`; None where it has none."""
    part, settings = description.parts[server], description.settings
    if not part.segments:
        return None
    named = {
        f"{number}": values[each.start - part.start : each.stop - part.start]
        for number, each in enumerate(part.segments)
    }
    return DenseTable(
        named,
        lambda parameters: build_optimizer(
            settings.optimizer, parameters, settings.lr, settings.momentum, settings.weight_decay
        ),
        check_finite=False,
    )


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor as the bytes that MPI sends or fills."""
    assert tensor.is_contiguous(), tensor.shape
    return tensor.detach().view(-1).view(torch.uint8).numpy()
