"""Variables that harm device memory on its way through MPI: what the doctor says where one is set, and the cure.

docs/gpu.md has the same ones, with the source of each. Pure functions over the facts of ranks, as in gpu_diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from hpctrain.comm.cuda_aware import SWITCH, WORDS

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the older name and the newer one
VISIBLE, CRAY = "CUDA_VISIBLE_DEVICES", "MPICH_GPU_SUPPORT_ENABLED"


class Harm(NamedTuple):
    """What a value of one of `names` does."""

    names: tuple[str, ...]
    is_harmful: Callable[[str], bool]
    what: str
    cure: str


def _has(word: str) -> Callable[[str], bool]:
    return lambda value: word.lower() in value.lower().replace(" ", "").split(",")


def _is_off(value: str) -> bool:
    return WORDS.get(value.lower()) is False


def _leaves_out_cuda(value: str) -> bool:
    """Of a list of transports, or with ^ in front of those that are left out."""
    names = set(value.lower().lstrip("^").replace(" ", "").split(","))
    return bool(
        names & {"cuda", "cuda_copy"} if value.startswith("^") else not names & {"", "all", "cuda", "cuda_copy"}
    )


HARMS = (
    Harm(
        ALLOCATOR,
        _has("expandable_segments:True"),
        "MPI may not map torch's memory into another process (CUDA IPC), and goes a slow way without a word",
        f"leave expandable_segments out, or {SWITCH}=0",
    ),
    Harm(
        ALLOCATOR,
        _has("backend:cudaMallocAsync"),
        "MPI may not map torch's memory into another process (CUDA IPC)",
        f"leave backend out, or {SWITCH}=0",
    ),
    Harm(
        ("UCX_TLS",),
        _leaves_out_cuda,
        "UCX does not notice that memory is a device's: a segmentation fault",
        "add cuda to the list, as rc,sm,cuda",
    ),
    Harm(
        ("MPIR_CVAR_ENABLE_GPU",),
        _is_off,
        "MPICH does not ask whether memory is a device's",
        "unset it: MPICH that was built with CUDA takes device memory by default",
    ),
    Harm(
        ("OMPI_MCA_btl_smcuda_use_cuda_ipc",),
        _is_off,
        "Open MPI does not use CUDA IPC within a host",
        "unset it, unless ranks cannot map each other's memory",
    ),
    Harm(
        ("CUDA_LAUNCH_BLOCKING",),
        lambda value: value not in ("", "0"),
        "the host waits for each kernel, so that no transfer is hidden",
        "unset it; it is for debugging",
    ),
)
NAMES = {*(name for harm in HARMS for name in harm.names), VISIBLE, CRAY}


def harmful(ranks: list[dict], mpi: dict, required: bool) -> Iterator[tuple[str, str, str]]:
    """Findings, as in diagnosis, of ranks that train; without devices only where these are `required`."""
    if required or any(rank["gpu"]["devices"] for rank in ranks):
        for harm in HARMS:
            for name in harm.names:
                for value in dict.fromkeys(rank["gpu"]["variables"].get(name, "") for rank in ranks):
                    if value and harm.is_harmful(value):
                        yield "warning", f"{name}={value}: {harm.what}", harm.cure
    yield from _of_cray(ranks, mpi)
    yield from _of_binding(ranks)


def _of_cray(ranks: list[dict], mpi: dict) -> Iterator[tuple[str, str, str]]:
    """Cray MPICH ends at MPI_Init where its library for devices was neither linked nor loaded before."""
    is_on = any(WORDS.get(rank["gpu"]["variables"].get(CRAY, "").lower()) for rank in ranks)
    known = [each for each in mpi["cuda_aware"] if isinstance(each, list)]
    is_loaded = any(says and CRAY in why for answers in known for _, says, why in answers)
    if is_on and not is_loaded and "CRAY MPICH" in (mpi["library"] or "CRAY MPICH"):
        cure = f"LD_PRELOAD=libmpi_gtl_cuda.so with its folder, or mpi4py built with craype-accel-*; else {CRAY}=0"
        yield "warning", f"{CRAY}=1, and libmpi_gtl_cuda is not loaded: Cray MPICH ends at its start", cure


def _of_binding(ranks: list[dict]) -> Iterator[tuple[str, str, str]]:
    """Ranks of a node that see nothing of each other's devices; told once for each node."""
    told = set()
    for one, other in combinations(ranks, 2):
        seen = one["gpu"]["devices"], other["gpu"]["devices"]
        if one["node"] == other["node"] and one["node"] not in told and all(seen) and not {*seen[0]} & {*seen[1]}:
            told.add(one["node"])
            what = f"{one['host']}: {VISIBLE} shows ranks no device of another: MPI may not map memory between them"
            yield "warning", what, "show each rank all devices, as by srun --gpu-bind=none: hpctrain takes its own"
