"""Whether this MPI takes device memory (is CUDA-aware): four layers are asked, and the first that knows counts.

A wrong yes ends a run by a segmentation fault, a wrong no costs a copy. So a layer that says less than "it has CUDA,
and it is switched on" does not know, and what no layer knows is a no:

- `mpi_memory_alloc_kinds` without cuda: kinds that nobody asked mpiexec for may be left out (MPI 4.1, 12.4.3), and the
  first MPICH that had it knew none of devices (src/mpi/misc/memory_alloc_kinds.c).
- MPIX_Query_cuda_support of Open MPI before 5.0 and of MVAPICH tells how it was built (open-mpi/ompi#7970). That of old
  MPICH asserts what is false where it succeeds, so MPIX_GPU_query_support comes first.
- Variables, each for the library that reads it. MPICH_GPU_SUPPORT_ENABLED of Cray MPICH is for the devices of that
  libmpi_gtl_* which was linked (eth-cscs/cscs-docs#40); I_MPI_OFFLOAD may mean Level Zero unless I_MPI_OFFLOAD_MODE is
  cuda (Intel MPI Developer Reference, GPU Support); MV2_USE_CUDA (MVAPICH2-GDR user guide) became MVP_USE_CUDA in
  MVAPICH 3; opal_cuda_support is off in builds of conda-forge that have CUDA, as their notes say.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.comm.environment import libraries_loaded, library_name, mpi_library_path
from hpctrain.comm.progress import Progress

SWITCH = "HPCTRAIN_CUDA_AWARE"
KINDS = "mpi_memory_alloc_kinds"
MPIX_GPU_SUPPORT_CUDA = 0  # in the mpi.h of MPICH
VARIABLES = {  # what stands in the version of a library, and the variables that it reads
    "CRAY MPICH": ("MPICH_GPU_SUPPORT_ENABLED",),
    "MVAPICH": ("MV2_USE_CUDA", "MVP_USE_CUDA"),
    "Intel(R) MPI": ("I_MPI_OFFLOAD",),
    "Open MPI": ("OMPI_MCA_opal_cuda_support",),
}
WORDS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}

Answer = tuple[str, "bool | None", str]  # the layer, what it says (None: it does not know), and why


def ask(comm) -> list[Answer]:
    """Every layer's answer, in the order in which they count. ValueError for a wrong HPCTRAIN_CUDA_AWARE.

    `comm` is any communicator of a started MPI. Not collective: ranks may be answered differently.
    """
    from mpi4py import MPI

    library, path = MPI.Get_library_version(), mpi_library_path()
    return [
        by_switch(os.environ),
        by_info(comm.Get_info().Get(KINDS)),
        by_library(ctypes.CDLL(path) if path else None, library),
        by_variables(os.environ, library, libraries_loaded()),
    ]


def takes_device_memory(comm, progress: Progress) -> bool:
    """Whether MPI is given memory of devices as it is. If not, rank 0 of the launch says so once in a line.

    Not collective.
    """
    from mpi4py import MPI

    takes, why = verdict(ask(comm))
    if not takes and MPI.COMM_WORLD.rank == 0:
        progress.say_once(
            f"hpctrain: MPI takes memory of the host only, what leaves a device goes through it ({why}; {SWITCH}=1 "
            "if you know better)"
        )
    return takes


def verdict(answers: Iterable[Answer]) -> tuple[bool, str]:
    """Whether MPI takes device memory, and who says so."""
    for layer, says, why in answers:
        if says is not None:
            return says, f"{layer}: {why}"
    return False, "nobody knows"


def disagreement(answers: Iterable[Answer]) -> str | None:
    """A line where two layers say opposite things."""
    known = [answer for answer in answers if answer[1] is not None]
    other = next((answer for answer in known if answer[1] != known[0][1]), None)
    if other is None:
        return None
    told = [f"{layer} says {word(says)} ({why})" for layer, says, why in (known[0], other)]
    return f"whether MPI is CUDA-aware: {told[0]}, {told[1]}; the first counts"


def word(says: bool | None) -> str:
    return {True: "yes", False: "no", None: "does not know"}[says]


def by_switch(environ: Mapping[str, str]) -> Answer:
    """What the user says."""
    value = environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={value}: it is 0 (MPI takes host memory only), 1 (device memory too), or not set")
    return "switch", bool(int(value)) if value else None, f"{SWITCH}={value}" if value else f"{SWITCH} is not set"


def by_info(kinds: str | None) -> Answer:
    """What a communicator's info says: kinds of memory, each with restrictors, as `mpi,system,cuda:device`."""
    if kinds is None:
        return "info", None, f"no {KINDS}, which came with MPI 4.1"
    for kind in kinds.lower().split(","):
        name, *restrictors = kind.strip().split(":")
        if name == "cuda" and (not restrictors or "device" in restrictors):
            return "info", True, f"{KINDS} is {kinds}"
    return "info", None, f"{KINDS} is {kinds}: those of devices may be left out"


def by_library(mpi: Any, library: str) -> Answer:
    """What the loaded library says when asked by its own function; `mpi`: that library, None: not found."""
    if mpi is None:
        return "library", None, "its file is not known"
    if hasattr(mpi, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        if mpi.MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, ctypes.byref(flag)):
            return "library", None, "MPIX_GPU_query_support failed"
        return "library", bool(flag.value), f"MPIX_GPU_query_support(CUDA) gives {flag.value}"
    if not hasattr(mpi, "MPIX_Query_cuda_support"):
        return "library", None, f"{library_name(library)} has no function to ask"
    value = mpi.MPIX_Query_cuda_support()
    why = f"MPIX_Query_cuda_support gives {value}"
    if value and _tells_only_how_it_was_built(library):
        return "library", None, f"{why}: built with CUDA, but maybe not switched on"
    return "library", bool(value), why


def by_variables(environ: Mapping[str, str], library: str, loaded: Iterable[str]) -> Answer:
    """What the library's own variables say; `loaded`: the files of all loaded libraries."""
    read = next((names for version, names in VARIABLES.items() if version in library), ())
    name = next((name for name in read if environ.get(name)), None)
    if name is None:
        ignored = [name for names in VARIABLES.values() for name in names if name not in read and environ.get(name)]
        if ignored:
            return "variables", None, f"{library_name(library)} does not read {', '.join(ignored)}"
        return "variables", None, f"{' and '.join(read)} not set" if read else f"{library_name(library)} reads none"
    says, why = WORDS.get(environ[name].lower()), f"{name}={environ[name]}"
    if says and name == "MPICH_GPU_SUPPORT_ENABLED" and not any("libmpi_gtl_cuda" in path for path in loaded):
        return "variables", None, f"{why}, but libmpi_gtl_cuda is not loaded"
    if says and name == "I_MPI_OFFLOAD" and (mode := environ.get("I_MPI_OFFLOAD_MODE", "auto")) != "cuda":
        return "variables", None, f"{why}, but I_MPI_OFFLOAD_MODE={mode} need not be CUDA"
    return "variables", says, why


def _tells_only_how_it_was_built(library: str) -> bool:
    old = re.search(r"Open MPI v?(\d+)", library)
    return "MVAPICH" in library or bool(old and int(old[1]) < 5)
