"""What the workers pushed at one clock, put together in worker order."""

import torch

from hpctrain.model.aggregate import Aggregate
from hpctrain.model.row_values import add_up, sum_duplicates
from hpctrain.train.iteration import Gradient, Iteration
from hpctrain.train.service import ServiceSettings


class Round:
    """As `settings` say. ValueError where the result is not finite, or from the user's own aggregate."""

    def __init__(self, settings: ServiceSettings):
        self._how, self._update = settings.aggregate, settings.update
        self._aggregate = Aggregate(settings.aggregate)

    def combine(self, each: list[Iteration]) -> Gradient:
        """Of iterations in worker order; without a gradient where there are no items. Takes their memory."""
        items = sum(iteration.items for iteration in each)
        update = Gradient(items, sum(iteration.loss for iteration in each))
        if not items:
            return update
        update.dense, update.touched = self._dense(each, items)
        for table in sorted({table for iteration in each for table in iteration.rows}):
            found = self._rows([(*it.rows[table], it.items) for it in each if table in it.rows], items)
            if found is not None:
                update.rows[table] = found
        return update

    def _dense(self, each: list[Iteration], items: float) -> tuple[torch.Tensor | None, list[bool] | None]:
        pushed = [iteration for iteration in each if iteration.dense is not None]
        if not pushed:
            return None, None
        masks = [iteration.touched for iteration in pushed]
        touched = None if None in masks else [any(flags) for flags in zip(*masks)]
        if self._how in ("mean", "sum"):
            total = pushed[0].dense
            for iteration in pushed[1:]:
                total += iteration.dense
            if self._how == "mean" and items != 1:
                total *= 1.0 / items
        else:
            stacked = torch.stack([iteration.dense for iteration in pushed])
            total = self._aggregate.dense(stacked, [iteration.items for iteration in pushed])
        if len(pushed) > 1 and total is not None:
            _check_finite(total, "the dense gradients")
        return total, touched

    def _rows(self, rows: list, items: float):
        """Of one table, from (ids, sums, items) of each worker; `items` are those of all, also without a row here."""
        if self._how not in ("mean", "sum"):
            return self._aggregate.rows(rows)
        if len(rows) == 1 and self._update == "server":  # then nobody sees in which order they are
            ids, sums = sum_duplicates(rows[0][0].numpy(), rows[0][1])
            ids = torch.from_numpy(ids)
        else:
            ids, sums = add_up([(ids, sums) for ids, sums, _ in rows])
        if len(rows) > 1:
            _check_finite(sums, "rows")
        return ids, sums.mul_(1.0 / items) if self._how == "mean" else sums


def _check_finite(total: torch.Tensor, what: str) -> None:
    """Each share was; is their sum?"""
    if not torch.isfinite(total.sum()) and not torch.isfinite(total).all():
        raise ValueError(f"{what} of all workers together are not finite")
