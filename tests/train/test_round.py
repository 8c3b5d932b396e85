"""Iterations of one clock put together: what is finite by itself may not be together."""

import pytest
import torch

from hpctrain.train.iteration import Iteration
from hpctrain.train.round import Round
from hpctrain.train.service import ServiceSettings


def pushed(value: float, items: float = 1.0) -> Iteration:
    ids = torch.tensor([3, 5])
    return Iteration(0, items, 0.0, 0.1, 0, torch.full((4,), value), None, {0: (ids, torch.full((2, 3), value))})


def test_a_mean_goes_over_all_items():
    update = Round(ServiceSettings()).combine([pushed(2.0, 3), pushed(6.0, 1)])
    assert update.items == 4 and torch.equal(update.dense, torch.full((4,), 2.0))
    assert update.rows[0][0].tolist() == [3, 5] and torch.equal(update.rows[0][1], torch.full((2, 3), 2.0))


@pytest.mark.parametrize("aggregate", ("mean", "sum"))
@pytest.mark.parametrize("part", ("dense", "rows"))
def test_a_sum_that_overflows_is_refused(aggregate, part):
    each = [pushed(3e38), pushed(3e38)]
    for iteration in each:
        if part == "rows":
            iteration.dense = None
        else:
            iteration.rows = {}
    what = "the dense gradients" if part == "dense" else "rows"
    with pytest.raises(ValueError, match=f"{what} of all workers together are not finite"):
        Round(ServiceSettings(aggregate=aggregate)).combine(each)


def test_without_items_there_is_no_gradient():
    update = Round(ServiceSettings()).combine([pushed(1.0, 0.0)])
    assert update.dense is None and not update.rows
