"""Consecutive layers of a model on one rank, and the forward and backward of one micro-batch.

Layer i is built under a seed of its own, so it starts with the same values on whatever rank and in whatever layout.
Before each layer's forward the generator is set from (seed, step, micro-batch of the whole batch, layer): dropout
draws the same mask wherever that micro-batch is computed, and again when it is recomputed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hpctrain.plan.seeds import derive_seed


class Stage:
    """`layers` applied in order; the first of them is layer `first` of the whole model.

    Parameters and buffers have global names, `layers.3.weight`, the same in every layout.
    """

    def __init__(self, layers: Sequence[nn.Module], first: int = 0, seed: int = 0):
        self.layers = list(layers)
        self.first = first
        self.seed = seed

    def forward(self, inputs: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
        """Outputs of the last layer for one micro-batch; `microbatch` counts over all replicas."""
        for index, layer in enumerate(self.layers, self.first):
            if layer.training:
                torch.default_generator.manual_seed(derive_seed(self.seed, "forward", step, microbatch, index))
            inputs = layer(inputs)
        return inputs

    def train(self, mode: bool = True) -> None:
        for layer in self.layers:
            layer.train(mode)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, by its first global name, in layer order."""
        return self._named(lambda layer: layer.named_parameters())

    def named_buffers(self) -> dict[str, torch.Tensor]:
        return self._named(lambda layer: layer.named_buffers())

    def state(self) -> dict[str, torch.Tensor]:
        """What a weights file holds: parameters and persistent buffers by global name, shared ones once."""
        return self._named(lambda layer: layer.state_dict(keep_vars=True).items())

    def _named(self, members: Callable) -> dict:
        named = {}
        seen = set()
        for index, layer in enumerate(self.layers, self.first):
            for name, tensor in members(layer):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[f"layers.{index}.{name}"] = tensor
        return named


def build_stage(factories: Sequence[Callable[[], nn.Module]], seed: int, dtype: torch.dtype, first: int = 0) -> Stage:
    """Builds the layers that `factories` give; the first of them is layer `first` of the model."""
    layers = []
    for index, factory in enumerate(factories, first):
        torch.manual_seed(derive_seed(seed, "layer", index))
        layers.append(factory().to(dtype))
    return Stage(layers, first, seed)
