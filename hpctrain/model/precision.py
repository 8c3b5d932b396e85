"""In which dtype weights are kept, and in which they are multiplied.

`bf16-mixed` keeps weights, gradients and optimizer states in float32: an update is often smaller than the distance of
two neighbouring bfloat16 numbers, and would be lost (Micikevicius et al., Mixed Precision Training, ICLR 2018).
torch's autocast chooses the dtype of each operation; bfloat16 has float32's range, so the loss needs no scaling.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hpctrain.model.structure import to_floating

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16-mixed": torch.float32}


class Precision:
    """`name` is one of DTYPES; `dtype` is that of weights, gradients, inputs and losses."""

    def __init__(self, name: str = "float32"):
        self.dtype = DTYPES[name]
        self._mixed = name == "bf16-mixed"

    def convert(self, layer: nn.Module) -> nn.Module:
        """`layer` itself, floating-point tensors in `dtype`; complex ones, which Module.to makes real, as they are."""
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.dtype)
        return layer

    def forward(self, kind: str = "cpu"):
        """A context for a micro-batch's forward on a `kind` of device; the backward follows its dtypes by itself."""
        return torch.autocast(kind, torch.bfloat16) if self._mixed else nullcontext()

    def for_loss(self, outputs: Any) -> Any:
        """What the loss is computed from: outputs of the model, in full precision."""
        return to_floating(outputs, self.dtype) if self._mixed else outputs
