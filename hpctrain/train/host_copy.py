"""Tensors of a device in the host's memory, for what knows of no other: parameter servers hold all they have there."""

import torch


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory of the host for a copy: pinned, where a device copies to it or from it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


class HostCopy:
    """As many numbers as `tensor` has, in `host`; where that is on the host both are one, and nothing is copied.

    torch copies behind what it was told before, and returns when the copy is there.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._is_one = tensor.device.type == "cpu"
        self.host = tensor if self._is_one else empty_like(tensor)

    def fetch(self) -> torch.Tensor:
        """`host`, with what the tensor holds."""
        if not self._is_one:
            self.host.copy_(self._tensor)
        return self.host

    def store(self) -> None:
        """Gives the tensor what `host` holds."""
        if not self._is_one:
            self._tensor.copy_(self.host)
