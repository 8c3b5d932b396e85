"""What a rank knows about CUDA: its devices, torch, CuPy, what the job was given, and whether MPI takes device memory.

torch is loaded only where it was built with CUDA and the driver shows devices: elsewhere its answer is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import distributions

from hpctrain.comm import cuda_aware
from hpctrain.comm.devices import torch_cuda, visible_devices
from hpctrain.tools.gpu_variables import NAMES

VARIABLES = {*NAMES, "CUDA_DEVICE_ORDER", "GPU_DEVICE_ORDINAL"}


def gpu_facts(environ: Mapping[str, str], is_server: bool) -> dict:
    """Of one rank, as JSON can hold it."""
    devices, no_device = ([], "a server takes none") if is_server else visible_devices()
    built = torch_cuda()
    return {
        "devices": devices,
        "no_device": no_device,
        "torch_cuda": built,
        "torch_devices": _torch_devices() if built and devices else 0,
        "cupy": sorted(f"{each.name} {each.version}" for each in distributions() if each.name.startswith("cupy")),
        "variables": {name: value for name, value in environ.items() if _concerns_devices(name)},
    }


def mpi_answers(comm) -> list | str:
    """Every layer's answer to whether MPI is CUDA-aware; a line where what the user says cannot be understood."""
    try:
        return cuda_aware.ask(comm)
    except ValueError as error:
        return str(error)


def _torch_devices() -> int | str:
    """How many devices torch sees, or why it cannot be asked."""
    try:
        import torch

        return torch.cuda.device_count()
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]


def _concerns_devices(name: str) -> bool:
    return name in VARIABLES or (name.startswith("SLURM_") and "GPU" in name)
