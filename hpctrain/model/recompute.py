"""A forward that is computed again where its backward needs it: only its inputs are kept in between.

Both computations see the same random numbers: a stage sets torch's generator before each layer by itself, and those of
NumPy and Python are brought back to where they were. The second one leaves generators and buffers as it found them, so
nothing after it knows that it happened.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.model.buffers import KeptBuffers
from hpctrain.model.random_state import random_state_kept
from hpctrain.model.structure import tensors_in


class WritesInPlace(Exception):
    """A forward changed its inputs."""


class Recomputed:
    """`forward(inputs)` of `modules`, run once without a graph by `first`, and once with one by `again`."""

    def __init__(self, forward: Callable[[Any], Any], modules: Sequence[nn.Module]):
        self._forward, self._modules = forward, modules

    def first(self, inputs: Any) -> Any:
        """WritesInPlace where the forward wrote to its inputs, which are needed again."""
        self._random = random.getstate(), np.random.get_state()
        versions = [tensor._version for tensor in tensors_in(inputs)]
        with torch.no_grad():
            outputs = self._forward(inputs)
        if [tensor._version for tensor in tensors_in(inputs)] != versions:
            raise WritesInPlace
        return outputs

    def again(self, inputs: Any) -> Any:
        """With a graph; `inputs` are the same numbers. Call `end` after the backward."""
        self._kept = KeptBuffers(self._modules)
        with random_state_kept():
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
            return self._forward(inputs)

    def end(self) -> None:
        """Brings buffers back to where `again` found them; a backward would not have them changed before."""
        self._kept.restore()
