"""Running statistics of batch normalisation over all ranks.

Such a layer sees the rows of its own rank only, so every rank has running means and variances of its own, and none of
them are those of the data. Before an evaluation, or before weights are saved, their mean over the ranks takes their
place.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm.group import Group


class RunningStatistics:
    """All layers of batch normalisation inside `layers` (modules by name) that keep running statistics.

    `names` are the dotted names of these layers, the same on all ranks of `group`.
    """

    def __init__(self, layers: Mapping[str, nn.Module], group: Group):
        self._group = group
        found: dict[int, tuple[str, nn.Module]] = {}
        for prefix, layer in layers.items():
            for name, module in layer.named_modules(prefix=prefix):
                if isinstance(module, _BatchNorm) and module.running_mean is not None:
                    found.setdefault(id(module), (name, module))
        self.names = [name for name, _ in found.values()]
        self._layers = [module for _, module in found.values()]
        self._remembered: list[torch.Tensor] = []

    def remember(self) -> None:
        """Keeps a copy of this rank's statistics, and of the number of batches seen."""
        self._remembered = self._copies()

    def restore(self) -> None:
        """Brings back what `remember` kept."""
        assert len(self._remembered) == len(self._own()), "restore() before remember()"
        self._take(self._remembered)

    def average(self, weight: float) -> None:
        """Replaces means and variances by their mean over the ranks, the same bits on all. Collective.

        `weight` is this rank's share, such as the items that it has seen; a weight of 0 counts for nothing, and where
        that of all ranks is 0 nothing changes.
        """
        assert weight >= 0, weight
        if self._group.size == 1 or not self._layers:
            return
        averaged = [tensor for layer in self._layers for tensor in (layer.running_mean, layer.running_var)]
        values = np.concatenate([tensor.double().flatten().numpy() for tensor in averaged])
        total = np.append(values * weight if weight else np.zeros_like(values), weight)
        self._group.ring.all_reduce(total, "running statistics").wait()
        if total[-1]:
            pieces = torch.from_numpy(total[:-1] / total[-1]).split([tensor.numel() for tensor in averaged])
            for tensor, piece in zip(averaged, pieces):
                tensor.copy_(piece.view(tensor.shape))

    @contextmanager
    def averaged(self, weight: float) -> Iterator[None]:
        """Averaged inside, this rank's own again afterwards. Collective."""
        own = self._copies()
        self.average(weight)
        try:
            yield
        finally:
            self._take(own)

    def _own(self) -> list[torch.Tensor]:
        tensors = [(layer.running_mean, layer.running_var, layer.num_batches_tracked) for layer in self._layers]
        return [tensor for three in tensors for tensor in three]

    def _copies(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._own()]

    def _take(self, copies: list[torch.Tensor]) -> None:
        for tensor, copy in zip(self._own(), copies):
            tensor.copy_(copy)
