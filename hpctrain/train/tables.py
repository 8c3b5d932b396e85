"""The tables of a task, put together: embeddings replaced by lookups, rows in memory of this rank or on servers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from hpctrain.config import Config
from hpctrain.model.aggregate import Aggregate
from hpctrain.model.lookup import Lookup, build_with_tables
from hpctrain.model.row_optimizers import build_row_optimizer
from hpctrain.model.tables import EmbeddingTable
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.tasks.table import Table
from hpctrain.train.errors import AgreedError
from hpctrain.train.lookups import KeptBatches
from hpctrain.train.service import ServiceSettings, TableShape

PIECE_ROWS = 1 << 16  # that are brought together at once


class Tables(NamedTuple):
    """The tables of a model, their lookups by name, and the batches whose ids they are asked for."""

    tables: Mapping[str, Table]
    modules: Mapping[str, Lookup]
    batches: KeptBatches


def tables_of(task) -> dict[str, Table]:
    """By parameter name. AgreedError for what tables() gives instead."""
    if not hasattr(task, "tables"):
        return {}
    tables = task.tables()
    if not isinstance(tables, Mapping) or not all(isinstance(each, Table) for each in tables.values()):
        raise AgreedError("--task: tables() should give {name of an embedding's weight: hpctrain.Table(ids)}")
    return dict(tables)


def with_lookups(
    factories: Sequence[Callable[[], nn.Module]], tables: Mapping[str, Table], is_module: bool
) -> tuple[list[Callable[[], nn.Module]], dict[str, Lookup]]:
    """Factories of the same layers with lookups in place of the tables, which the dict holds once they are built."""
    found: dict[str, Lookup] = {}
    build = partial(_build, names=set(tables), found=found)
    prefixes = ["" if is_module else f"layers.{index}" for index in range(len(factories))]
    return [partial(build, factory, prefix) for factory, prefix in zip(factories, prefixes)], found


def _build(factory: Callable[[], nn.Module], prefix: str, names: set[str], found: dict[str, Lookup]) -> nn.Module:
    layer, lookups = build_with_tables(factory, prefix, names)
    found |= lookups
    return layer


def check(config: Config, tables: Mapping[str, Table]) -> None:
    """AgreedError for a layout in which tables have no place, or that is of no use without any. ValueError, one line,
    for an --aggregate that cannot be loaded.
    """
    Aggregate(config.aggregate)
    if tables and config.stages > 1:
        raise AgreedError(f"--stages {config.stages}: the task has tables(), whose rows go to --servers; leave it out")
    if tables and not SCHEDULES[config.schedule].flushes:
        raise AgreedError(f"--schedule {config.schedule}: the task has tables(); take 1f1b")
    if config.dense_via == "ring" and not tables:
        raise AgreedError("--dense-via ring: the task has no tables(), so nothing is left for the servers; take ps")


def check_found(tables: Mapping[str, Table], found: Mapping[str, Lookup]) -> None:
    """AgreedError for a table that is no embedding of the model."""
    for name in tables:
        if name not in found:
            raise AgreedError(f"--task: tables() names {name}, which is no nn.Embedding's weight in this model")


def local_tables(
    config: Config, tables: Mapping[str, Table], modules: Mapping[str, Lookup]
) -> dict[str, EmbeddingTable]:
    """All rows of each table on this rank, as they come to be touched."""
    settings = service_settings(config)
    name = settings.table_optimizer or settings.optimizer
    return {
        shape.name: EmbeddingTable(
            shape.name,
            shape.num_rows,
            shape.width,
            settings.seed,
            shape.std,
            build_row_optimizer(name, settings.momentum, settings.weight_decay),
            table_dtype(config),
            max_rows=settings.max_rows,
            check_finite=False,
        )
        for shape in table_shapes(tables, modules)
    }


def table_dtype(config: Config) -> torch.dtype:
    """Of rows and their gradients: that of the weights."""
    return torch.float64 if config.precision == "float64" else torch.float32


def table_shapes(tables: Mapping[str, Table], modules: Mapping[str, Lookup]) -> list[TableShape]:
    """In the order of tables()."""
    return [
        TableShape(name, modules[name].num_embeddings, modules[name].embedding_dim, table.std)
        for name, table in tables.items()
    ]


def service_settings(config: Config) -> ServiceSettings:
    """What the servers are asked to do."""
    return ServiceSettings(
        staleness=config.staleness,
        update=config.update,
        aggregate=config.aggregate,
        optimizer=config.optimizer,
        table_optimizer=config.table_optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adapt_lr=config.adapt_lr,
        max_rows=config.max_table_rows,
        seed=config.seed,
        record=config.record_log,
    )


def whole_table(module: Lookup, dtype: torch.dtype) -> torch.Tensor:
    """All rows of a table, (num_rows, width), those that nobody touched as they would begin."""
    values = torch.empty(module.num_embeddings, module.embedding_dim, dtype=dtype)
    for start in range(0, len(values), PIECE_ROWS):
        ids = torch.arange(start, min(len(values), start + PIECE_ROWS))
        values[start : start + len(ids)] = module.fetch(ids)
    return values
