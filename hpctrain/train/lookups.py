"""The tables of a model on one rank: which rows a step looks up, where they come from, and their gradients then."""

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from hpctrain.comm.abort import RankFailed
from hpctrain.comm.mesh import Mesh
from hpctrain.model.lookup import Lookup
from hpctrain.model.random_state import CPU
from hpctrain.model.row_values import TableError
from hpctrain.model.tables import EmbeddingTable
from hpctrain.tasks.table import Table
from hpctrain.train.batches import Batches, MicroBatch
from hpctrain.train.client import ServiceClient
from hpctrain.train.pull import Pull

Rows = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by table: ids (n,), ascending, and numbers (n, width)


class KeptBatches:
    """As the Batches inside, whose micro-batches may be read before they are asked for."""

    def __init__(self, batches: Batches):
        self._batches = batches
        self._kept: dict[tuple[int, int], MicroBatch | None] = {}
        self._read_until = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def ahead(self, step: int) -> list[MicroBatch]:
        """All micro-batches of a step that have rows; they stay until they are asked for."""
        for index in range(self._batches.num_microbatches):
            if (step, index) not in self._kept and step > self._read_until:
                self._kept[step, index] = self._batches.microbatch(step, index)
        self._read_until = max(self._read_until, step)
        kept = (self._kept.get((step, index)) for index in range(self._batches.num_microbatches))
        return [batch for batch in kept if batch is not None]

    def microbatch(self, step: int, index: int) -> MicroBatch | None:
        if (step, index) in self._kept:
            return self._kept.pop((step, index))
        return self._batches.microbatch(step, index)


class Source(Protocol):
    """Where rows come from."""

    def ask(self, step: int, ids: Mapping[str, torch.Tensor], clock: int) -> None:
        """The rows that a step will want, as they may be read at `clock`."""

    def take(self, step: int) -> dict[str, torch.Tensor]:
        """They, by table, in the order of the ids. Waits."""

    def look(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows outside training; none is created."""


@contextmanager
def one_line():
    """RankFailed in place of a TableError."""
    try:
        yield
    except TableError as error:
        raise RankFailed(str(error)) from None


class LocalRows:
    """Tables of this rank's own."""

    def __init__(self, tables: Mapping[str, EmbeddingTable]):
        self.tables = dict(tables)
        self._asked: dict[int, Mapping[str, torch.Tensor]] = {}

    def ask(self, step: int, ids: Mapping[str, torch.Tensor], clock: int) -> None:
        self._asked[step] = ids

    def take(self, step: int) -> dict[str, torch.Tensor]:
        asked = self._asked.pop(step)
        with one_line():
            return {name: self.tables[name].rows(ids) for name, ids in asked.items()}

    def look(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self.tables[name].rows(ids, create=False)

    def change(self, gradients: Rows, lr: float, scale: float = 1.0) -> None:
        """One step of the tables' optimizer for each row."""
        with one_line():
            for name, (ids, sums) in gradients.items():
                self.tables[name].push(ids, sums, lr=lr, scale=scale)


class ServedRows:
    """Tables on servers. `clock`: when reads outside training take place."""

    def __init__(self, client: ServiceClient):
        self._client = client
        self.numbers = {table.name: number for number, table in enumerate(client.description.tables)}
        self._pulls: dict[int, dict[str, Pull]] = {}
        self.clock = 0
        self.versions: dict[int, int] = {}  # by server, of what was taken last; of several tables the oldest

    def ask(self, step: int, ids: Mapping[str, torch.Tensor], clock: int) -> None:
        self._pulls[step] = {
            name: self._client.pull_rows(self.numbers[name], each, clock) for name, each in ids.items()
        }

    def take(self, step: int) -> dict[str, torch.Tensor]:
        pulls = {name: pull.wait() for name, pull in self._pulls.pop(step).items()}
        self.versions = oldest(*(pull.versions for pull in pulls.values()))
        return {name: pull.values for name, pull in pulls.items()}

    def look(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self._client.pull_rows(self.numbers[name], ids, self.clock, bound=0, create=False).wait().values


def oldest(*versions: Mapping[int, int]) -> dict[int, int]:
    """By server, the least."""
    servers = {server for each in versions for server in each}
    return {server: min(each[server] for each in versions if server in each) for server in servers}


class Lookups:
    """`modules` of a model by table, what `tables` say of them, and where rows come from. Rows of a step are asked for
    with `ask`, held by the modules from `load` on, and their gradients are summed over its micro-batches. The model is
    on `device`, rows are kept, and travel, on the host.
    """

    def __init__(
        self,
        modules: Mapping[str, Lookup],
        tables: Mapping[str, Table],
        source: Source,
        batches: KeptBatches,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ):
        self.modules, self.source, self._batches, self.dtype = dict(modules), source, batches, dtype
        self._device = device
        self._tables = tables
        self._ids: dict[int, dict[str, torch.Tensor]] = {}
        for name, module in self.modules.items():
            module.fetch = lambda ids, name=name: source.look(name, ids.cpu()).to(ids.device)

    def ask(self, step: int, clock: int) -> None:
        """Reads the step's rows of data and asks for what they look up, unless that has happened."""
        if step in self._ids:
            return
        inputs = [batch.inputs for batch in self._batches.ahead(step)]
        found = {name: self._looked_up(name, inputs) for name in self.modules}
        self._ids[step] = found
        self.source.ask(step, found, clock)

    def load(self, step: int) -> None:
        """Waits for the rows of a step, which are what is looked up from now on."""
        self.ask(step, step)
        ids = self._ids.pop(step)
        for name, rows in self.source.take(step).items():
            self.modules[name].hold(ids[name].to(self._device), rows.to(self._device))

    def gradients(self) -> Rows:
        """Sums over the step's items, of rows that got a gradient."""
        found = {name: (module.held, module.rows.grad) for name, module in self.modules.items() if len(module.held)}
        return {name: (ids.cpu(), sums.cpu()) for name, (ids, sums) in found.items() if sums is not None}

    def sum_over_replicas(self, mesh: Mesh) -> Rows:
        """The gradients of all replicas, the same on each. Collective."""
        widths = {name: module.embedding_dim for name, module in self.modules.items()}
        return sum_over_replicas(self.gradients(), widths, self.dtype, mesh)

    def _looked_up(self, name: str, inputs: list) -> torch.Tensor:
        """Distinct ids, ascending. RankFailed for what tables() gives instead, or an id that is not in the table."""
        pieces = []
        for each in inputs:
            ids = self._tables[name].ids(each)
            if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64:
                what = f"{ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
                raise RankFailed(f"--task: ids of table {name} are {what}; tables() should give int64 tensors")
            pieces.append(ids.reshape(-1))
        ids = torch.cat(pieces).unique() if pieces else torch.empty(0, dtype=torch.int64)
        num_rows = self.modules[name].num_embeddings
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < num_rows:
            first = int(ids[0]) if int(ids[0]) < 0 else int(ids[ids >= num_rows][0])
            raise RankFailed(f"table {name}: id {first} is out of range, it has rows 0 to {num_rows - 1}")
        return ids


def sum_over_replicas(gradients: Rows, widths: Mapping[str, int], dtype: torch.dtype, mesh: Mesh) -> Rows:
    """The same for all replicas: of each table all rows that any of them has, and their sums. Collective.

    The ids go to everybody, then a matrix of the rows in their union goes round the ring: 2(n-1)/n times its size,
    never more than the whole table would take.
    """
    if mesh.data.size == 1:
        return gradients
    summed: Rows = {}
    for name, width in widths.items():
        own, sums = gradients.get(name, (torch.empty(0, dtype=torch.int64), None))
        union = torch.from_numpy(_union(own.numpy(), mesh))
        if not len(union):
            continue
        total = torch.zeros(len(union), width, dtype=dtype)
        if sums is not None:
            total[torch.searchsorted(union, own)] = sums
        mesh.data.ring.all_reduce(total, f"rows of {name}").wait()
        summed[name] = union, total
    return summed


def _union(ids: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Distinct ids of all replicas, ascending. Collective."""
    lengths = np.zeros(mesh.data.size, np.int64)
    lengths[mesh.replica] = len(ids)
    mesh.data.ring.one_shot(lengths, "numbers of rows").start().wait()
    longest = int(lengths.max())
    everything = np.zeros(longest * mesh.data.size, np.int64)
    everything[mesh.replica * longest :][: len(ids)] = ids
    mesh.data.ring.all_gather(everything, "ids of rows").wait()
    pieces = [everything[rank * longest :][:length] for rank, length in enumerate(lengths.tolist())]
    return np.unique(np.concatenate(pieces))


def check_rows(gradients: Rows, step: int, rank: int) -> None:
    """RankFailed, one line, where a row's gradient is not finite."""
    for name, (ids, sums) in gradients.items():
        if not torch.isfinite(sums).all():
            first = int(ids[~torch.isfinite(sums).all(1)][0])
            raise RankFailed(f"step {step + 1}: not finite: the gradient of row {first} of {name} on rank {rank}")
