"""How much memory the activations of the micro-batches in flight take: what the backward will need of the forward."""

from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks


class ActivationMeter:
    """Bytes of saved tensors, each storage once, weights excluded. `peak` is the most at any time.

    `weights()` gives the tensors that do not count. Saving is watched while `active`; that costs a call a tensor.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]):
        self._weights = weights
        self._held: dict[Hashable, dict[int, int]] = {}  # by micro-batch: bytes by address of the storage
        self.active = True
        self.peak = 0

    def saving(self, key: Hashable):
        """A context: what is saved inside belongs to `key`."""
        if not self.active:
            return nullcontext()
        excluded = {_address(tensor) for tensor in self._weights()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if _address(tensor) not in excluded:
                self._add(key, tensor)
            return tensor.detach()

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def hold(self, key: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """These belong to `key` too."""
        for tensor in tensors if self.active else ():
            self._add(key, tensor)

    def release(self, key: Hashable) -> None:
        """Nothing of it is needed any more."""
        self._held.pop(key, None)

    def _add(self, key: Hashable, tensor: torch.Tensor) -> None:
        self._held.setdefault(key, {})[_address(tensor)] = tensor.untyped_storage().nbytes()
        held = {address: size for each in self._held.values() for address, size in each.items()}
        self.peak = max(self.peak, sum(held.values()))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
