"""A forward that is computed again where its backward needs it: only its inputs are kept in between.

Both computations see the same random numbers: a stage sets torch's generator before each layer by itself, and those of
NumPy and Python are brought back to where they were. The second one leaves generators and buffers as it found them, so
nothing after it knows that it happened.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from hpctrain.model.structure import tensors_in


class Recomputed:
    """`forward(inputs)`, run once without a graph by `first`, and once with one by `again`. `buffers` may change."""

    def __init__(self, forward: Callable[[Any], Any], buffers: Iterable[torch.Tensor]):
        self._forward, self._buffers = forward, list(buffers)

    def first(self, inputs: Any) -> Any:
        """RuntimeError where the forward wrote to its inputs, which are needed again."""
        self._random = random.getstate(), np.random.get_state()
        versions = [tensor._version for tensor in tensors_in(inputs)]
        with torch.no_grad():
            outputs = self._forward(inputs)
        if [tensor._version for tensor in tensors_in(inputs)] != versions:
            raise RuntimeError("the first layer of a stage writes to its inputs in place; --recompute needs them again")
        return outputs

    def again(self, inputs: Any) -> Any:
        """With a graph; `inputs` are the same numbers. Call `end` after the backward."""
        now = random.getstate(), np.random.get_state()
        self._kept = [buffer.clone() for buffer in self._buffers]
        with torch.random.fork_rng(devices=[]):
            _set_random(self._random)
            outputs = self._forward(inputs)
        _set_random(now)
        return outputs

    def end(self) -> None:
        """Brings buffers back to where `again` found them; a backward would not have them changed before."""
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._kept):
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def _set_random(states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
