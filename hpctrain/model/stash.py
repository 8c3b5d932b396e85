"""The weights that each micro-batch in flight was computed with, where a stage steps before they are all through.

Forward and backward of a micro-batch use one version of the weights (weight stashing: Narayanan et al., PipeDream, SOSP
2019). The optimizer owns the stage's own parameters, which no graph sees; a version is a copy of them, in memory that
is used again once nobody needs the version. So a stage that holds k versions keeps k + 1 copies of its weights.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from hpctrain.model.gradients import ALIGNMENT


class WeightStash:
    """Versions of `parameters` (by name, those that require a gradient), numbered from 0 by the updates made before.

    `allocate(nbytes)` gives aligned memory as uint8, where the parameters are; `on_gradient(name, gradient)` gets
    what a backward brings.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], allocate: Callable, on_gradient: Callable):
        self._parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self._allocate, self._on_gradient = allocate, on_gradient
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        self._free: list[dict[str, torch.Tensor]] = []
        self.peak = 0  # versions held at once

    def restart(self) -> None:
        """Nothing is in flight: the weights as they are now are version 0, and the only one."""
        self.retire(max(self._versions, default=-1) + 1)
        self.publish(0)

    def publish(self, version: int) -> None:
        """Copies the weights as they are now."""
        assert version not in self._versions, version
        copies = self._free.pop() if self._free else self._new()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                copies[name].copy_(parameter)
        self._versions[version] = copies
        self.peak = max(self.peak, len(self._versions))

    def weights(self, version: int) -> Mapping[str, torch.Tensor]:
        """By name. KeyError for a version that is not there: then the schedule and the stash disagree."""
        return self._versions[version]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of all versions."""
        for copies in self._versions.values():
            yield from copies.values()

    def addresses(self) -> set[int]:
        """Of the storages that versions lie in."""
        firsts = (next(iter(copies.values()), None) for copies in self._versions.values())
        return {first.untyped_storage().data_ptr() for first in firsts if first is not None}

    def retire(self, oldest: int) -> None:
        """No micro-batch needs a version before `oldest` any more."""
        for version in [version for version in self._versions if version < oldest]:
            self._free.append(self._versions.pop(version))

    def _new(self) -> dict[str, torch.Tensor]:
        sizes = {name: -(-each.nbytes // ALIGNMENT) * ALIGNMENT for name, each in self._parameters.items()}
        memory = torch.as_tensor(self._allocate(sum(sizes.values())))
        copies, offset = {}, 0
        for name, parameter in self._parameters.items():
            piece = memory[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            copies[name] = piece.requires_grad_()
            copies[name].register_post_accumulate_grad_hook(self._hook(name))
            offset += sizes[name]
        return copies

    def _hook(self, name: str) -> Callable:
        def hook(copy: torch.Tensor) -> None:
            gradient, copy.grad = copy.grad, None
            for each in (self._parameters[name]._backward_hooks or {}).values():  # as if it had been the parameter
                changed = each(gradient)
                gradient = gradient if changed is None else changed
            self._on_gradient(name, gradient)

        return hook
