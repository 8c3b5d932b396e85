"""What layers note about the rows that they see: running statistics of normalisation, and other buffers.

Such a layer sees the rows of its own rank only, so every rank has running means and variances of its own, and none of
them are those of the data. Before an evaluation, or before weights are saved, their mean over the ranks takes their
place. Other buffers that a forward changes have no mean that one could know of; they stay each rank's own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hpctrain.comm.group import Group
from hpctrain.model.buffers import KeptBuffers


class RunningStatistics:
    """All layers inside `layers` (modules by name) that keep running means and variances: BatchNorm, InstanceNorm.

    `names` are the dotted names of these layers, the same on all ranks of `group`; `mixing` those of all layers that
    mix the rows of a batch, with running statistics or without.
    """

    def __init__(self, layers: Mapping[str, nn.Module], group: Group):
        self._group = group
        found: dict[int, tuple[str, nn.Module]] = {}
        for prefix, layer in layers.items():
            for name, module in layer.named_modules(prefix=prefix):
                if isinstance(module, _NormBase):
                    found.setdefault(id(module), (name, module))
        self.mixing = [name for name, module in found.values() if isinstance(module, _BatchNorm)]
        kept = [(name, module) for name, module in found.values() if module.running_mean is not None]
        self.names = [name for name, _ in kept]
        self._layers = [module for _, module in kept]
        self._modules = list(dict.fromkeys(module for layer in layers.values() for module in layer.modules()))
        self._remembered = KeptBuffers(())

    def remember(self) -> None:
        """Keeps a copy of all of this rank's buffers."""
        self._remembered = KeptBuffers(self._modules)

    def restore(self) -> None:
        """Brings back what `remember` kept."""
        self._remembered.restore()

    def average(self, weight: float) -> None:
        """Replaces means and variances by their mean over the ranks, the same bits on all. Collective.

        `weight` is this rank's share, such as the items that it has seen; a weight of 0 counts for nothing, and where
        that of all ranks is 0 nothing changes.
        """
        assert weight >= 0, weight
        if self._group.size == 1 or not self._layers:
            return
        averaged = self._averaged()
        values = np.concatenate([tensor.double().flatten().cpu().numpy() for tensor in averaged])
        total = np.append(values * weight if weight else np.zeros_like(values), weight)
        self._group.ring.all_reduce(total, "running statistics").wait()
        if total[-1]:
            pieces = torch.from_numpy(total[:-1] / total[-1]).split([tensor.numel() for tensor in averaged])
            for tensor, piece in zip(averaged, pieces):
                tensor.copy_(piece.view(tensor.shape))

    @contextmanager
    def averaged(self, weight: float) -> Iterator[None]:
        """Averaged inside, this rank's own again afterwards. Collective."""
        own = [tensor.clone() for tensor in self._averaged()]
        self.average(weight)
        try:
            yield
        finally:
            for tensor, copy in zip(self._averaged(), own):
                tensor.copy_(copy)

    def _averaged(self) -> list[torch.Tensor]:
        return [tensor for layer in self._layers for tensor in (layer.running_mean, layer.running_var)]
