"""The dense part of a model on a parameter server: segments of parameters in one flat arena."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.model.gradients import ALIGNMENT
from hpctrain.model.row_values import TableError


class DenseTable:
    """Segments by name, each a parameter or a range of one, as parameters in one flat arena, stepped by torch.

    `values` is the arena, flat, of one dtype; segment `name` lies in `values[places[name]]`, from a multiple of 64
    bytes on, and zeros fill the gaps. `make_optimizer(list of nn.Parameter)` gives a torch optimizer.
    """

    def __init__(self, segments: Mapping[str, Tensor], make_optimizer: Callable, check_finite: bool = True):
        dtypes = sorted({str(tensor.dtype) for tensor in segments.values()})
        if len(dtypes) != 1:
            raise TableError(f"dense table: segments of one dtype are needed, not of {', '.join(dtypes) or 'none'}")
        self.dtype, self.check_finite = next(iter(segments.values())).dtype, check_finite
        self.places: dict[str, slice] = {}
        unit, offset = ALIGNMENT // self.dtype.itemsize, 0
        for name, tensor in segments.items():
            self.places[name] = slice(offset, offset + tensor.numel())
            offset += -(-tensor.numel() // unit) * unit
        self.values = _aligned(offset, self.dtype)
        self.parameters = {}
        for name, tensor in segments.items():
            self.values[self.places[name]] = tensor.detach().reshape(-1)
            self.parameters[name] = nn.Parameter(self.values[self.places[name]].view(tensor.shape))
        self.optimizer: torch.optim.Optimizer = make_optimizer(list(self.parameters.values()))

    def step(self, gradients: Tensor, *, touched: Iterable[str] | None = None, lr: float | None = None) -> None:
        """One step of the segments named in `touched` (None: of all) with `gradients`, laid out as `values`.

        The other segments and their optimizer state stay. `lr` is set in all parameter groups. After a TableError no
        value has changed.
        """
        touched = set(self.parameters if touched is None else touched)
        strange = sorted(touched - self.parameters.keys())
        given, wanted = (gradients.dtype, tuple(gradients.shape)), (self.dtype, tuple(self.values.shape))
        if strange:
            raise TableError(f"dense table: there is no segment {strange[0]}")
        if given != wanted:
            raise TableError(f"dense table: gradients {given[0]} {given[1]}, not {wanted[0]} {wanted[1]}")
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[self.places[name]].view_as(parameter) if name in touched else None
            if self.check_finite and parameter.grad is not None and not parameter.grad.isfinite().all():
                raise TableError(f"dense table: the gradient of {name} holds NaN or infinity")
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self.optimizer.step()


def _aligned(count: int, dtype: torch.dtype) -> Tensor:
    """`count` zeros, from a multiple of 64 bytes on."""
    memory = torch.from_numpy(np.empty(count * dtype.itemsize + ALIGNMENT, np.uint8)).zero_()  # in huge pages
    offset = -memory.data_ptr() % ALIGNMENT
    return memory[offset : offset + count * dtype.itemsize].view(dtype)
