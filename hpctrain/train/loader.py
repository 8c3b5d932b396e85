"""Rows as micro-batches, read here or ahead of time by processes of their own.

A process that is forked after MPI has started may crash or hang in it. So with --loader-workers a fork server starts
before MPI does (`cli.before_mpi`), and torch's DataLoader forks its workers from there. A worker builds the data set
anew from a recipe, so a user's data set need not be picklable.

Before each row is read the generators of torch, Python and NumPy are set from (seed, epoch, row): random augmentation
is the same in every layout and with any number of workers.
"""

import multiprocessing.connection
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from hpctrain.comm.abort import RankFailed
from hpctrain.model.structure import to_floating
from hpctrain.plan.seeds import derive_seed
from hpctrain.tasks.storage import DataError
from hpctrain.train.checked import checked_row


class Request(NamedTuple):
    """Which rows of the data set, in which epoch."""

    rows: tuple[int, ...]
    epoch: int = 0


class Failed(NamedTuple):
    """What a worker answers where the data cannot be read."""

    line: str


class Reader:
    """Answers requests with (inputs, targets), stacked; floating-point tensors in `dtype`.

    `open_dataset()` gives the map-style data set; a worker calls it in its own process, where it must be picklable.
    `dataset` is that of this process, where there is one already.
    """

    def __init__(self, open_dataset: Callable[[], Any], dtype: torch.dtype, seed: int = 0, dataset: Any = None):
        self.open_dataset, self.dtype, self.seed = open_dataset, dtype, seed
        self._dataset = dataset

    def __getitem__(self, request: Request) -> tuple[Any, Any] | Failed:
        try:
            if self._dataset is None:
                self._dataset = self.open_dataset()
            rows = [self._row(row, request.epoch) for row in request.rows]
        except DataError as error:
            return Failed(str(error))
        except OSError as error:
            return Failed(f"a row cannot be read: {error.filename}: {error.strerror}" if error.filename else str(error))
        except RankFailed as error:
            return Failed(str(error))
        inputs, targets = default_collate(rows)
        return to_floating(inputs, self.dtype), to_floating(targets, self.dtype)

    def __getstate__(self):
        return {**self.__dict__, "_dataset": None}

    def _row(self, row: int, epoch: int) -> tuple[Any, Any]:
        seed = derive_seed(self.seed, "row", epoch, row)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        return checked_row(self._dataset[row], row)


def read(reader: Reader, requests: Iterable[Request], num_workers: int = 0) -> Iterator[tuple[Any, Any]]:
    """The batches asked for, in order. Raises RankFailed where the data cannot be read."""
    batches = _read_ahead(reader, requests, num_workers) if num_workers else _read_here(reader, requests)
    for batch in batches:
        if isinstance(batch, Failed):
            raise RankFailed(batch.line)
        yield batch


def _read_here(reader: Reader, requests: Iterable[Request]) -> Iterator[Any]:
    """A generator, in which a StopIteration of the data set is an error and no end."""
    for request in requests:
        yield reader[request]


def _read_ahead(reader: Reader, requests: Iterable[Request], num_workers: int) -> Iterator[Any]:
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_begin_worker,
        multiprocessing_context="forkserver",
        generator=torch.Generator(),
    )
    try:
        yield from loader
    except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:  # or as it hands over a batch
        if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
            raise
        raise RankFailed(f"a process of --loader-workers was killed, most often for want of memory: {error}") from None


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin_worker(_number: int) -> None:
    for each in (signal.SIGINT, signal.SIGUSR1):  # from a terminal, or Slurm, to the rank and to this process too
        signal.signal(each, signal.SIG_IGN)  # SIGTERM is how the rank ends it
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_rank, daemon=True).start()


def _end_with_the_rank() -> None:
    """Ends this process when its rank does, whatever ended that: the fork server lives as long as its workers do."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
