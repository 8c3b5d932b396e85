"""The layers of a model on one rank, and the forward of one micro-batch.

Layer i is built under a seed of its own, so it starts with the same values on whatever rank and in whatever layout.
Before each layer's forward the generator is set from (seed, step, micro-batch of the whole batch, layer): dropout
draws the same mask wherever that micro-batch is computed, and again when it is recomputed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hpctrain.model.precision import Precision
from hpctrain.model.random_state import CPU, seed_generators
from hpctrain.plan.seeds import derive_seed


class Stage:
    """`layers` applied in order; the first of them is layer `first` of a model of `num_layers`, by default the last.

    A rank may hold several runs of consecutive layers, `parts`: then `layers` are those of all runs. Parameters and
    buffers have global names, `layers.3.weight`, the same in every layout; a model that is one module keeps its own
    names (`is_module`). All are on `device`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int = 0,
        seed: int = 0,
        precision: Precision | None = None,
        is_module: bool = False,
        parts: Sequence[range] | None = None,
        num_layers: int | None = None,
        device: torch.device = CPU,
    ):
        self.layers = list(layers)
        self.parts = list(parts) if parts is not None else [range(first, first + len(self.layers))]
        self.num_layers = num_layers or self.parts[-1].stop
        self._places = {index: place for place, index in enumerate(index for part in self.parts for index in part)}
        assert len(self._places) == len(self.layers), (self.parts, len(self.layers))
        self.seed, self.device = seed, device
        self.precision = precision or Precision()
        self.is_module = is_module
        self._names_inside: dict[int, dict[str, str]] = {}

    def forward(self, inputs: Any, step: int, microbatch: int, part: int = 0, weights: Mapping | None = None) -> Any:
        """Outputs of the last layer of a part for one micro-batch; `microbatch` counts over all replicas.

        A dict goes into a layer as keyword arguments. `weights`, by global name, take the place of the parameters.
        """
        with self.precision.forward(self.device.type):
            for index in self.parts[part]:
                layer = self.layers[self._places[index]]
                if layer.training:
                    seed_generators(derive_seed(self.seed, "forward", step, microbatch, index), self.device)
                inputs = self._call(index, layer, inputs, weights)
        return self.precision.for_loss(inputs) if self.is_last(part) else inputs

    def _call(self, index: int, layer: nn.Module, inputs: Any, weights: Mapping | None) -> Any:
        arguments, named = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
        if weights is None:
            return layer(*arguments, **named)
        instead = {inside: weights[name] for inside, name in self._trained(index).items()}
        return functional_call(layer, instead, arguments, named)

    def _trained(self, index: int) -> dict[str, str]:
        """Parameters of a layer that require a gradient: their names inside it, and the global one, also of tied."""
        if index not in self._names_inside:
            global_names = {id(parameter): name for name, parameter in self.named_parameters().items()}
            inside = self.layers[self._places[index]].named_parameters(remove_duplicate=False)
            found = {name: global_names[id(parameter)] for name, parameter in inside if parameter.requires_grad}
            self._names_inside[index] = found
        return self._names_inside[index]

    def is_first(self, part: int) -> bool:
        """Whether this part begins the model."""
        return self.parts[part].start == 0

    def is_last(self, part: int) -> bool:
        """Whether this part ends the model."""
        return self.parts[part].stop == self.num_layers

    def is_trained(self, part: int) -> bool:
        """Whether a layer of this part has a parameter that requires a gradient."""
        return any(self._trained(index) for index in self.parts[part])

    def aliases(self) -> dict[str, str]:
        """Names under which `state` holds nothing, because the tensor stands there under another name already."""
        names = {id(tensor): name for name, tensor in self.state().items()}
        every = {}
        for prefix, layer in self.named_layers().items():
            for name, tensor in layer.state_dict(keep_vars=True).items():
                every[self.join(prefix, name)] = names.get(id(tensor))
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
        return {self._name(index): self.layers[place] for index, place in self._places.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, by its first global name, in layer order."""
        return self._named(lambda layer: layer.named_parameters())

    def named_buffers(self) -> dict[str, torch.Tensor]:
        return self._named(lambda layer: layer.named_buffers())

    def state(self) -> dict[str, torch.Tensor]:
        """What a weights file holds: parameters and persistent buffers by global name, shared ones once."""
        return self._named(lambda layer: layer.state_dict(keep_vars=True).items())

    def shapes(self) -> dict[str, list[int]]:
        """Of all parameters, shared ones under each of their names."""
        return {
            self.join(prefix, name): list(parameter.shape)
            for prefix, layer in self.named_layers().items()
            for name, parameter in layer.named_parameters(remove_duplicate=False)
        }

    def tie(self, sets: Iterable[Sequence[str]]) -> None:
        """Makes the parameters of each set one, the first of them; names that are not on this rank are left out."""
        here = self.shapes()
        for names in sets:
            first, *others = [name for name in names if name in here] or [None]
            for other in others:
                self._replace(self._find(other), self._find(first))

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Everywhere: what was tied to the old one is tied to the new one then."""
        for layer in self.layers:
            for module in layer.modules():
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    if parameter is old:
                        setattr(module, name, new)

    def _find(self, name: str) -> nn.Parameter:
        for prefix, layer in self.named_layers().items():
            for inside, parameter in layer.named_parameters(remove_duplicate=False):
                if self.join(prefix, inside) == name:
                    return parameter
        raise KeyError(name)

    def _name(self, index: int) -> str:
        return "" if self.is_module else f"layers.{index}"

    def _named(self, members: Callable) -> dict:
        named = {}
        seen = set()
        for prefix, layer in self.named_layers().items():
            for name, tensor in members(layer):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[self.join(prefix, name)] = tensor
        return named

    @staticmethod
    def join(prefix: str, name: str) -> str:
        return f"{prefix}.{name}" if prefix else name


def build_stage(
    factories: Sequence[Callable[[], nn.Module]],
    seed: int,
    precision: Precision,
    first: int = 0,
    is_module: bool = False,
    check: Callable[[nn.Module, str], nn.Module] = lambda layer, name: layer,
    parts: Sequence[range] | None = None,
    device: torch.device = CPU,
) -> Stage:
    """Builds the layers that `factories` give; the first of them is layer `first` of the model.

    With `parts` only those layers: then `factories` are those of the whole model. `check` sees each layer, and the
    name that its parameters begin with, as it was built: on the host, so with the same values whatever `device` it
    comes to then.
    """
    numbered = dict(enumerate(factories, first))
    layers = []
    for index in numbered if parts is None else [index for part in parts for index in part]:
        torch.manual_seed(derive_seed(seed, "layer", index))
        layer = check(numbered[index](), "module()" if is_module else f"layers.{index}")
        layers.append(precision.convert(layer).to(device))
    return Stage(layers, first, seed, precision, is_module, parts, first + len(factories), device)
