"""Consecutive layers of a model on one rank, and the forward and backward of one micro-batch.

Layer i is built under a seed of its own, so it starts with the same values on whatever rank and in whatever layout.
Before each layer's forward the generator is set from (seed, step, micro-batch of the whole batch, layer): dropout
draws the same mask wherever that micro-batch is computed, and again when it is recomputed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpctrain.model.precision import Precision
from hpctrain.plan.seeds import derive_seed


class Stage:
    """`layers` applied in order; the first of them is layer `first` of the whole model.

    Parameters and buffers have global names, `layers.3.weight`, the same in every layout; a model that is one module
    keeps its own names (`is_module`).
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int = 0,
        seed: int = 0,
        precision: Precision | None = None,
        is_module: bool = False,
    ):
        self.layers = list(layers)
        self.first = first
        self.seed = seed
        self.precision = precision or Precision()
        self.is_module = is_module

    def forward(self, inputs: Any, step: int, microbatch: int) -> Any:
        """Outputs of the last layer for one micro-batch; `microbatch` counts over all replicas.

        A dict goes into a layer as keyword arguments.
        """
        with self.precision.forward():
            for index, layer in enumerate(self.layers, self.first):
                if layer.training:
                    torch.default_generator.manual_seed(derive_seed(self.seed, "forward", step, microbatch, index))
                inputs = layer(**inputs) if isinstance(inputs, Mapping) else layer(inputs)
        return self.precision.for_loss(inputs)

    def aliases(self) -> dict[str, str]:
        """Names under which `state` holds nothing, because the tensor stands there under another name already."""
        names = {id(tensor): name for name, tensor in self.state().items()}
        every = {}
        for prefix, layer in self.named_layers().items():
            for name, tensor in layer.state_dict(keep_vars=True).items():
                every[f"{prefix}.{name}" if prefix else name] = names.get(id(tensor))
        return {name: first for name, first in every.items() if first is not None and first != name}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Everything in evaluation mode and without a graph inside; each module in its own mode again afterwards."""
        modes = [(module, module.training) for layer in self.layers for module in layer.modules()]
        for module, _ in modes:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def named_layers(self) -> dict[str, nn.Module]:
        """Layers by the name that begins the names of their parameters; a module's own is empty."""
        return {self._name(index): layer for index, layer in enumerate(self.layers, self.first)}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, by its first global name, in layer order."""
        return self._named(lambda layer: layer.named_parameters())

    def named_buffers(self) -> dict[str, torch.Tensor]:
        return self._named(lambda layer: layer.named_buffers())

    def state(self) -> dict[str, torch.Tensor]:
        """What a weights file holds: parameters and persistent buffers by global name, shared ones once."""
        return self._named(lambda layer: layer.state_dict(keep_vars=True).items())

    def tie(self, ties: Iterable[tuple[str, str]]) -> None:
        """Makes the second parameter of each pair of names the first one. ValueError for a name that is none."""
        for kept, other in ties:
            (owner, attribute), (target, replaced) = self._place(kept), self._place(other)
            parameter, old = getattr(owner, attribute), getattr(target, replaced)
            if parameter.shape != old.shape:
                shapes = f"{list(parameter.shape)} and {list(old.shape)}"
                raise ValueError(f"--task: ties() names {kept} and {other}, of shapes {shapes}; they should be equal")
            self._replace(old, parameter)

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Everywhere: what was tied to the old one is tied to the new one then."""
        for layer in self.layers:
            for module in layer.modules():
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    if parameter is old:
                        setattr(module, name, new)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """The module that owns a parameter, and what it calls it."""
        for prefix, layer in self.named_layers().items():
            inside = name.removeprefix(f"{prefix}." if prefix else "")
            if (prefix == "" or inside != name) and inside in dict(layer.named_parameters(remove_duplicate=False)):
                path, _, attribute = inside.rpartition(".")
                return layer.get_submodule(path), attribute
        raise ValueError(
            f"--task: ties() names {name}, which is no parameter; there is {', '.join(self.named_parameters())}"
        )

    def _name(self, index: int) -> str:
        return "" if self.is_module else f"layers.{index}"

    def _named(self, members: Callable) -> dict:
        named = {}
        seen = set()
        for prefix, layer in self.named_layers().items():
            for name, tensor in members(layer):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[f"{prefix}.{name}" if prefix else name] = tensor
        return named


def build_stage(
    factories: Sequence[Callable[[], nn.Module]],
    seed: int,
    precision: Precision,
    first: int = 0,
    is_module: bool = False,
    check: Callable[[nn.Module, str], nn.Module] = lambda layer, name: layer,
) -> Stage:
    """Builds the layers that `factories` give; the first of them is layer `first` of the model.

    `check` sees each layer, and the name that its parameters begin with, as it was built.
    """
    layers = []
    for index, factory in enumerate(factories, first):
        torch.manual_seed(derive_seed(seed, "layer", index))
        layers.append(precision.convert(check(factory(), "module()" if is_module else f"layers.{index}")))
    return Stage(layers, first, seed, precision, is_module)
