"""A device that is none: tensors that torch takes to be on a device of its own, with memory of the host behind them.

What mixes them with tensors of the host is refused, as CUDA refuses it, and so is what asks for their memory as NumPy's
array. So a whole run on this device shows that every tensor is brought to where it is used. What MPI carries of them
goes through comm's own code for devices, with tests/comm/stand_in.py in CuPy's place.
"""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from hpctrain.comm import buffer, device_buffer
from hpctrain.comm.stream import Device
from tests.comm.stand_in import RUBBISH, DeviceArray, StandIn

NAME = "pretended"
COPIES = ("aten::_to_copy", "aten::copy_")  # what may take from one device and give to another


class Module(_DummyBackendModule):
    """What torch asks about a device: its generator is that of the host, for kernels of the host draw from it."""

    def manual_seed(self, seed: int) -> None:
        self.last_seed = seed

    def get_device_name(self, device) -> str:
        return "none at all"

    def max_memory_allocated(self, device) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device) -> None:
        pass


_setup_privateuseone_for_python_backend(NAME, backend_module=Module())  # before torch's engine counts devices
DEVICE = torch.device(NAME, 0)
WAITS = [0]  # times that the host asked for a number, and so waited until the device had come there


class Pretended(torch.Tensor):
    """`on_host`: the numbers, a tensor of the host."""

    @staticmethod
    def __new__(cls, on_host: torch.Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls, on_host.shape, on_host.stride(), on_host.storage_offset(), dtype=on_host.dtype, device=DEVICE
        )
        self.on_host = on_host
        return self

    def __repr__(self):
        return f"Pretended({self.on_host})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # else results of the host would be Pretended too

    @property
    def data(self) -> "Pretended":
        return self.detach()

    @data.setter
    def data(self, other: "Pretended") -> None:
        self.on_host = other.on_host

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def untyped_storage(self):
        return self.on_host.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        return dispatch(operation, arguments, options or {})


class Mode(TorchDispatchMode):
    """Without it torch would look for kernels of its own to make the first tensor there."""

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        return dispatch(operation, arguments, options or {})


def dispatch(operation, arguments, options):
    """On the host, if all that is no single number is on one device."""
    name, tensors = operation._schema.name, [t for t in tree_leaves((arguments, options)) if torch.is_tensor(t)]
    there = [isinstance(each, Pretended) for each in tensors]
    sized = [place for place, each in zip(there, tensors, strict=True) if each.dim()]
    if name not in COPIES and any(there) and not all(sized):
        raise RuntimeError(f"{name}: tensors on {DEVICE} and on cpu")
    is_there = any(there) if name != "aten::copy_" else there[0]
    if options.get("device") is not None:
        is_there = torch.device(options["device"]).type == NAME
        options = {**options, "device": torch.device("cpu")}
    WAITS[0] += any(there) and (name == "aten::_local_scalar_dense" or name in COPIES and not is_there)
    result = operation(*tree_map(_inner, arguments), **tree_map(_inner, options))
    same = {id(_inner(each)): each for each in tensors}
    return tree_map(lambda each: same.get(id(each), _outer(each) if is_there else each), result)


def _inner(value):
    return value.on_host if isinstance(value, Pretended) else value


def _outer(value):
    return Pretended(value) if torch.is_tensor(value) else value


@contextmanager
def pretending(seed: int = 0, is_for_mpi: bool = False):
    """Inside, tensors may be on DEVICE; gives the library in CuPy's place. No two things there are in disorder."""
    library = StandIn(seed, looks=2, is_for_mpi=is_for_mpi)
    with pretended(library):
        yield library
    library.finish()
    assert not library.problems, library.problems


@contextmanager
def pretended(library: StandIn):
    """Inside, tensors may be on DEVICE, and comm works there by `library`."""
    handle = Device(library, 0)

    def of_tensor(tensor):
        is_bfloat16 = tensor.dtype == torch.bfloat16
        values = tensor.on_host.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else tensor.on_host.numpy()
        return device_buffer.see(DeviceArray(library, values), handle, "bfloat16" if is_bfloat16 else None)

    def allocate(_, nbytes):
        return rubbish(nbytes)

    with (
        mock.patch.object(buffer, "DEVICE_KINDS", (NAME,)),
        mock.patch.object(device_buffer, "of_cuda_tensor", of_tensor),
        mock.patch.object(device_buffer, "torch_device", lambda number: handle),
        mock.patch.object(device_buffer, "_allocate_there", allocate),
        Mode(),
    ):
        yield


def rubbish(nbytes: int) -> Pretended:
    """Uninitialised memory."""
    return Pretended(torch.full((nbytes,), RUBBISH, dtype=torch.uint8))
