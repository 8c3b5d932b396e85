"""Where and with what a run was made: read from the process and its files, so that nothing is started after MPI is."""

import platform
import resource
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import hpctrain
from hpctrain.comm.environment import library_name
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh

if TYPE_CHECKING:
    import torch


def environment(mesh: Mesh, threads: int, data_sha256: str | None, device: "torch.device") -> dict:
    """The summary's `environment`. Collective."""
    hosts = mesh.world.all_gather_json(socket.gethostname())
    return {
        "hpctrain": hpctrain.__version__,
        "git": git_commit(Path(hpctrain.__file__).parent.parent),
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "numpy", "mpi4py")},
        "mpi": mpi_library() if mesh.world.comm is not None else None,
        "hosts": sorted(set(hosts)),
        "cpu": cpu_name(),
        "device": device_name(device),
        "threads": threads,
        "data_sha256": data_sha256,
    }


def first_of_node(world: Group) -> int:
    """The first rank of those on this rank's node: it alone does what is done once a node. Collective."""
    return world.all_gather_json(socket.gethostname()).index(socket.gethostname())


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name(device: "torch.device") -> str:
    """As `cuda:0 NVIDIA H200`; of the host just `cpu`."""
    if device.type == "cpu":
        return "cpu"
    import torch

    return f"{device} {getattr(torch, device.type).get_device_name(device)}"


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def mpi_library() -> str:
    from mpi4py import MPI

    return library_name(MPI.Get_library_version())


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def git_commit(root: Path) -> str | None:
    """The commit that is checked out in `root`, by reading its files; None where it is no checkout."""
    try:
        head = (root / ".git" / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        reference = root / ".git" / head.removeprefix("ref: ")
        if reference.exists():
            return reference.read_text().strip()
        packed = (root / ".git" / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(head.removeprefix("ref: "))), None)
