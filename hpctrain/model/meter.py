"""How much memory the activations of the micro-batches in flight take: what the backward will need of the forward."""

from collections import Counter
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
        self._held: dict[Hashable, set[int]] = {}  # by micro-batch: addresses of its storages
        self._uses: Counter[int] = Counter()  # of each storage
        self._sizes: dict[int, int] = {}
        self._bytes = self.peak = 0
        self.active = True

    def saving(self, key: Hashable):
        """A context: what is saved inside belongs to `key`. As without it, a saved tensor may not be written to."""
        if not self.active:
            return nullcontext()
        excluded = {_address(tensor) for tensor in self._weights()}

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
            if _address(tensor) not in excluded:
                self._add(key, tensor)
            saved = tensor.detach()
            return saved, saved._version

        return saved_tensors_hooks(pack, _unpack)

    def hold(self, key: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """These belong to `key` too."""
        for tensor in tensors if self.active else ():
            self._add(key, tensor)

    def release(self, key: Hashable) -> None:
        """Nothing of it is needed any more."""
        for address in self._held.pop(key, ()):
            self._uses[address] -= 1
            if not self._uses[address]:
                self._bytes -= self._sizes.pop(address)
                del self._uses[address]

    def _add(self, key: Hashable, tensor: torch.Tensor) -> None:
        address, held = _address(tensor), self._held.setdefault(key, set())
        if address in held:
            return
        held.add(address)
        self._uses[address] += 1
        if address not in self._sizes:
            self._sizes[address] = tensor.untyped_storage().nbytes()
            self._bytes += self._sizes[address]
            self.peak = max(self.peak, self._bytes)


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {list(tensor.shape)} is at version {tensor._version}, and was saved at {version}"
        )
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
