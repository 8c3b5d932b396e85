"""Optimizers that step some rows of a table and leave all others as they are, bit for bit.

A row that is pushed in every step moves as a parameter of torch's optimizer of that name; one that is not pushed has no
step: no momentum, no weight decay, and its bias correction counts its own steps. (torch.optim.SparseAdam instead
counts the steps of the table.) Formulas and order of operations are torch's.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor


class RowOptimizer:
    """Without state: SGD, as torch.optim.SGD. `weight_decay` is added to the gradient, times the row."""

    counts_steps = False  # whether `update` needs the number of steps of each row

    def __init__(self, weight_decay: float = 0.0):
        self.weight_decay = weight_decay

    def slots(self, width: int) -> dict[str, int]:
        """Names and widths of the state that goes with a row of `width`; it begins as zeros."""
        return {}

    def update(self, values: Tensor, slots: list[Tensor], gradients: Tensor, steps: np.ndarray | None, lr: float):
        """One step of n rows, in place: `values` (n, width), `slots` (n, width of each), in the order of `slots()`.

        `gradients` (n, width) are only read. `steps` (n,) int32 counts the steps of each row, this one included.
        """
        values.add_(self._decayed(gradients, values), alpha=-lr)

    def _decayed(self, gradients: Tensor, values: Tensor) -> Tensor:
        return gradients.add(values, alpha=self.weight_decay) if self.weight_decay else gradients


class Sgd(RowOptimizer):
    """As torch.optim.SGD without momentum."""


class Momentum(RowOptimizer):
    """As torch.optim.SGD with momentum, without dampening."""

    def __init__(self, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(weight_decay)
        self.momentum = momentum

    def slots(self, width: int) -> dict[str, int]:
        return {"momentum_buffer": width}

    def update(self, values: Tensor, slots: list[Tensor], gradients: Tensor, steps: np.ndarray | None, lr: float):
        slots[0].mul_(self.momentum).add_(self._decayed(gradients, values))
        values.add_(slots[0], alpha=-lr)


class Adagrad(RowOptimizer):
    """As torch.optim.Adagrad (Duchi, Hazan and Singer, JMLR 2011)."""

    def __init__(self, weight_decay: float = 0.0, eps: float = 1e-10):
        super().__init__(weight_decay)
        self.eps = eps

    def slots(self, width: int) -> dict[str, int]:
        return {"sum": width}

    def update(self, values: Tensor, slots: list[Tensor], gradients: Tensor, steps: np.ndarray | None, lr: float):
        gradients = self._decayed(gradients, values)
        self._accumulate(slots[0], gradients)
        values.addcdiv_(gradients, slots[0].sqrt().add_(self.eps), value=-lr)

    def _accumulate(self, sums: Tensor, gradients: Tensor) -> None:
        sums.addcmul_(gradients, gradients)


class RowwiseAdagrad(Adagrad):
    """One accumulator a row, of the mean of the gradient's squares, as RowWiseAdagrad of TorchRec and FBGEMM."""

    def slots(self, width: int) -> dict[str, int]:
        return {"sum": 1}

    def _accumulate(self, sums: Tensor, gradients: Tensor) -> None:
        sums.add_(gradients.square().mean(1, keepdim=True))


class Adam(RowOptimizer):
    """As torch.optim.Adam (Kingma and Ba, ICLR 2015), with steps counted for each row."""

    counts_steps = True

    def __init__(self, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8):
        super().__init__(weight_decay)
        self.betas, self.eps = betas, eps

    def slots(self, width: int) -> dict[str, int]:
        return {"exp_avg": width, "exp_avg_sq": width}

    def update(self, values: Tensor, slots: list[Tensor], gradients: Tensor, steps: np.ndarray | None, lr: float):
        gradients = self._decay(gradients, values, lr)
        average, square = slots
        average.lerp_(gradients, 1 - self.betas[0])
        square.mul_(self.betas[1]).addcmul_(gradients, gradients, value=1 - self.betas[1])
        first, second = (_corrections(beta) for beta in self.betas)
        step_size = -lr / first[np.minimum(steps, len(first) - 1)]
        root = np.sqrt(second[np.minimum(steps, len(second) - 1)])
        denominator = square.sqrt().div_(_column(root, values)).add_(self.eps)
        values.add_(average.mul(_column(step_size, values)).div_(denominator))

    def _decay(self, gradients: Tensor, values: Tensor, lr: float) -> Tensor:
        return self._decayed(gradients, values)


class AdamW(Adam):
    """As torch.optim.AdamW (Loshchilov and Hutter, ICLR 2019): the row itself shrinks by lr * weight_decay."""

    def _decay(self, gradients: Tensor, values: Tensor, lr: float) -> Tensor:
        if self.weight_decay:
            values.mul_(1 - lr * self.weight_decay)
        return gradients


ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "rowwise-adagrad": RowwiseAdagrad,
    "adam": Adam,
    "adamw": AdamW,
}


def build_row_optimizer(name: str, momentum: float = 0.9, weight_decay: float = 0.0) -> RowOptimizer:
    """The one of that name, a key of ROW_OPTIMIZERS; `momentum` belongs to the optimizer `momentum`."""
    if name == "momentum":
        return Momentum(momentum, weight_decay)
    return ROW_OPTIMIZERS[name](weight_decay=weight_decay)


@cache
def _corrections(beta: float) -> np.ndarray:
    """1 - beta^step by step, from 0 up to the first step where it is 1; Python's power, as torch has it."""
    assert 0 <= beta < 1, beta
    values = [0.0]
    while values[-1] < 1.0:
        values.append(1 - beta ** len(values))
    return np.array(values)


def _column(numbers: np.ndarray, values: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(values.dtype)[:, None]
