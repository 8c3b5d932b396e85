"""Buffers as they were: for a forward that is to leave no trace, or an update that is skipped."""

from collections.abc import Iterable

import torch
from torch import nn


class KeptBuffers:
    """Copies of all buffers of `modules` as they are now."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._kept = [
            (module, name, buffer, buffer.clone())
            for module in modules
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def restore(self) -> None:
        """Brings them back, also where a layer has put another tensor in its place."""
        with torch.no_grad():
            for module, name, buffer, copy in self._kept:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
                setattr(module, name, buffer)
