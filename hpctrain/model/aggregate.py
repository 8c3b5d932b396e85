"""From what several workers pushed to one gradient.

An aggregate takes `sums` (workers, n), the summed gradients of each worker's items, and `counts` (workers,), the
numbers of those items, and gives the gradient (n,). Workers without items are left out; where none has any, there is
no gradient and no update. Coordinate-wise median and trimmed mean bear workers that push nonsense (Yin, Chen,
Ramchandran and Bartlett, ICML 2018): they weigh workers alike, whatever their counts.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.model.row_values import add_up, sum_duplicates


def mean(sums: Tensor, counts: Tensor) -> Tensor:
    """The gradient of the mean over all items: added up in worker order, then times 1 / items."""
    return total(sums, counts).mul_(1.0 / float(counts.sum()))


def total(sums: Tensor, counts: Tensor) -> Tensor:
    """Added up in worker order, without division."""
    result = sums[0].clone()
    for each in sums[1:]:
        result += each
    return result


def median(sums: Tensor, counts: Tensor) -> Tensor:
    """Of the workers' means, for each coordinate; of an even number the mean of the two in the middle."""
    return _middle(sums, counts, (len(sums) - 1) // 2)


def trimmed_mean(sums: Tensor, counts: Tensor) -> Tensor:
    """Of the workers' means, for each coordinate, without the k largest and k smallest, added up in ascending order.

    k is a tenth of the workers, rounded down, but 1 at least from 3 workers on.
    """
    return _middle(sums, counts, max(len(sums) // 10, 1 if len(sums) >= 3 else 0))


def _middle(sums: Tensor, counts: Tensor, dropped: int) -> Tensor:
    """The mean of the workers' means without `dropped` at each end. NaN sorts as the largest."""
    means = sums * (1.0 / counts.double()).to(sums.dtype)[:, None]
    kept = means.sort(0).values[dropped : len(means) - dropped]
    return total(kept, counts).mul_(1.0 / len(kept))


AGGREGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean,
    "sum": total,
    "median": median,
    "trimmed-mean": trimmed_mean,
}


class Aggregate:
    """`name`: of AGGREGATES, or FILE.py:function with the same arguments and result. ValueError names --aggregate."""

    def __init__(self, name: str):
        self.name = name
        self._own = name not in AGGREGATES  # the user's own function
        self._function = self._load() if self._own else AGGREGATES[name]

    def dense(self, sums: Tensor, counts: Sequence[float] | Tensor) -> Tensor | None:
        """The gradient (n,) from `sums` (workers, n); None where no worker has items."""
        counts = torch.as_tensor(counts, dtype=torch.float64)
        assert counts.shape == sums.shape[:1] and sums.ndim == 2, (counts.shape, sums.shape)
        chosen = counts > 0
        if not chosen.any():
            return None
        if not chosen.all():
            sums, counts = sums[chosen], counts[chosen]
        return self._call(sums, counts)

    def rows(self, pushes: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor] | None:
        """Ids (ascending) and gradients of rows from (ids, sums (len(ids), width), count) of each worker.

        Each row is aggregated over the workers that pushed it, but `mean` divides by the items of all workers: those
        that did not push a row have a gradient of zero there. None where no worker has items.
        """
        pushes = [push for push in pushes if push[2] > 0]
        if not pushes:
            return None
        summed = [sum_duplicates(ids.numpy().astype(np.int64), sums.contiguous()) for ids, sums, _ in pushes]
        counts = torch.tensor([count for _, _, count in pushes], dtype=torch.float64)
        if self.name in ("mean", "sum"):
            ids, gradients = add_up([(torch.from_numpy(ids), sums) for ids, sums in summed])
            scale = 1.0 / float(counts.sum()) if self.name == "mean" else 1.0
            return ids, gradients * scale
        return self._by_pushers(summed, counts)

    def _by_pushers(self, summed: list[tuple[np.ndarray, Tensor]], counts: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that the same workers pushed are computed together; by the user's own function one by one."""
        ids = np.unique(np.concatenate([ids for ids, _ in summed]))
        positions = np.full((len(ids), len(summed)), -1)  # of each id in each worker's push
        for worker, (pushed, _) in enumerate(summed):
            positions[np.searchsorted(ids, pushed), worker] = np.arange(len(pushed))
        sets, group_of = np.unique(positions >= 0, axis=0, return_inverse=True)
        width = summed[0][1].shape[1]
        gradients = summed[0][1].new_empty(len(ids), width)
        for number, members in enumerate(sets):
            workers = np.flatnonzero(members)
            group = np.flatnonzero(group_of.reshape(-1) == number)
            for rows in np.split(group, len(group)) if self._own else [group]:
                stacked = torch.stack([summed[w][1][torch.from_numpy(positions[rows, w])] for w in workers])
                result = self._call(stacked.flatten(1), counts[torch.from_numpy(workers)])
                gradients[torch.from_numpy(rows)] = result.view(len(rows), width)
        return torch.from_numpy(ids), gradients

    def _call(self, sums: Tensor, counts: Tensor) -> Tensor:
        if not self._own:
            return self._function(sums, counts)
        try:
            result = self._function(sums, counts)
        except Exception as error:
            raise self._error(_told(error)) from error
        wanted = (sums.dtype, tuple(sums.shape[1:]))
        if not isinstance(result, Tensor) or (result.dtype, tuple(result.shape)) != wanted:
            got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise self._error(f"it returned {got}, not a tensor {wanted[0]} {wanted[1]}")
        if not result.isfinite().all():
            raise self._error("it returned NaN or infinity")
        return result.detach()

    def _load(self) -> Callable:
        file, _, attribute = self.name.rpartition(":")
        path = Path(file).absolute()
        if not file.endswith(".py") or not attribute:
            raise self._error(f"there is no such aggregate; choose {', '.join(AGGREGATES)} or FILE.py:function")
        if not path.is_file():
            raise self._error("no such file")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # it may import what lies beside it
        spec = importlib.util.spec_from_file_location(f"hpctrain_aggregate_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise self._error(_told(error)) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise self._error(f"{file} has no function {attribute}")
        return function

    def _error(self, message: str) -> ValueError:
        return ValueError(f"--aggregate {self.name}: {message}")


def _told(error: BaseException) -> str:
    """An error of the user's file in one line, with its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return " ".join(f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})".split())
