"""What facts about ranks and MPI mean: a table to read, and problems with their cures. Pure functions over plain data.

The facts of each rank are those of doctor.rank_facts, those of the MPI of doctor.mpi_facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.comm.environment import library_name, threads_per_rank, vendor
from hpctrain.tools.gpu_diagnosis import gpu_findings, gpu_table

LITTLE_SHARED_MEMORY = 64 << 20  # bytes a rank; MPI moves messages inside a node through it
FEW_FILES = 256
INSTALL_MPI = 'pip install "hpctrain[mpi]"; on a cluster: load its MPI, then pip install --no-binary=mpi4py mpi4py'

# "problem" (training stops, or what is required is not there) or "warning" (it is slower or alone), what, cure
Finding = tuple[str, str, str]


def report(ranks: list[dict], mpi: dict, cuda_required: bool = False) -> list[str]:
    """All lines to print: the table, then each finding with its cure."""
    rows = table(ranks, mpi)
    width = max(18, 2 + max(len(name) for name, _ in rows))
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    found = findings(ranks, mpi, cuda_required)
    for kind, what, cure in found:
        lines += ["", f"{kind}: {what}", f"  -> {cure}"]
    return [*lines, "", f"{len(found)} to look at" if found else "nothing to complain about"]


def table(ranks: list[dict], mpi: dict) -> list[tuple[str, str]]:
    """The facts as (name, value), in the order in which they are printed."""
    places = [(rank["host"], rank["cores"]) for rank in ranks]
    cores, names = cores_by_host(ranks), [host for host, _ in places]
    omp = sorted({rank["omp_num_threads"] or "not set" for rank in ranks})
    levels = {True: "MPI_THREAD_MULTIPLE", False: "lower than MPI_THREAD_MULTIPLE", None: "-"}
    return [
        *((name, version or "not installed") for name, version in mpi["versions"].items()),
        ("MPI library", _library(mpi)),
        ("thread level", levels[mpi["thread_multiple"]]),
        ("launcher", mpi["launcher"]),
        ("mpirun", " ".join(filter(None, (mpi["mpirun"], mpi["mpirun_vendor"]))) or "not in PATH"),
        ("ranks", f"{_count(len(ranks), 'rank')} on {_count(len(cores), 'host')}"),
        *((f"  {host}", f"{_count(names.count(host), 'rank')}, {_count(n, 'core')}") for host, n in cores.items()),
        ("threads per rank", f"{threads_per_rank(places)} by default (OMP_NUM_THREADS {', '.join(omp)})"),
        ("shared memory", f"{_megabytes(min(rank['shared_memory_free'] or 0 for rank in ranks))} free"),
        ("open files", f"at most {min(rank['open_files'] for rank in ranks)}"),
        ("runs go to", ranks[0]["run_dir"]),
        *gpu_table(ranks, mpi),
    ]


def findings(ranks: list[dict], mpi: dict, cuda_required: bool = False) -> list[Finding]:
    """Everything that is wrong or unusual; `cuda_required`: also a rank that trains and has no device."""
    found = [*_mpi_findings(mpi), *_folder_findings(ranks), *_host_findings(ranks)]
    return [*found, *gpu_findings(ranks, mpi, cuda_required)]


def exit_code(found: list[Finding]) -> int:
    """0, or 1 when something stops training."""
    return int(any(kind == "problem" for kind, *_ in found))


def cores_by_host(ranks: list[dict]) -> dict[str, int]:
    """The cores that the ranks of a host have together, whether they share them or have each its own."""
    cores: dict[str, set[int]] = {}
    for rank in ranks:
        cores.setdefault(rank["host"], set()).update(rank["cores"])
    return {host: len(numbers) for host, numbers in cores.items()}


def _mpi_findings(mpi: dict) -> Iterator[Finding]:
    for name in ("numpy", "torch"):
        if mpi["versions"][name] is None:
            yield "problem", f"{name} is not installed", f"pip install {name}"
    if mpi["versions"]["mpi4py"] is None:
        yield "warning", "mpi4py is not installed: hpctrain runs as one process only", INSTALL_MPI
    elif mpi["error"]:
        yield "problem", f"mpi4py cannot start an MPI library: {mpi['error']}", INSTALL_MPI
    if mpi["world_error"]:
        yield "problem", "the ranks do not know of each other", mpi["world_error"]
    if mpi["thread_multiple"] is False:
        cure = "another build of the library, or unset what lowers it (MPICH: MPIR_CVAR_DEFAULT_THREAD_LEVEL)"
        yield "warning", "MPI grants less than MPI_THREAD_MULTIPLE: it may wait 100 times slower", cure
    if mpi["library"] and mpi["mpirun_vendor"] not in (None, vendor(mpi["library"])):
        what = f"{mpi['mpirun']} is of {mpi['mpirun_vendor']}, mpi4py loads {library_name(mpi['library'])}"
        yield "problem", what, f"put the mpirun of {vendor(mpi['library'])} first in PATH"
    if mpi["library"] and not mpi["mpirun"]:
        yield "warning", "no mpirun in PATH", "activate the environment that has it; srun needs none"


def _folder_findings(ranks: list[dict]) -> Iterator[Finding]:
    failed = {rank["host"]: rank["run_dir_error"] for rank in ranks if rank["run_dir_error"]}
    if failed:
        what = "; ".join(f"{host}: {error}" for host, error in failed.items())
        yield "problem", f"cannot write to {ranks[0]['run_dir']}: {what}", "--run-dir PATH, where every host can write"


def _host_findings(ranks: list[dict]) -> Iterator[Finding]:
    for host, cores in cores_by_host(ranks).items():
        here = [rank for rank in ranks if rank["host"] == host]
        if len(here) > cores:
            what = f"{host}: {len(here)} ranks share {_count(cores, 'core')}"
            yield "warning", what, "results are right, but it is slow: start at most one rank a core"
        free = here[0]["shared_memory_free"]
        if free is None or free < LITTLE_SHARED_MEMORY * len(here):
            what = f"{host}: " + ("no shared memory" if free is None else f"{_megabytes(free)} of shared memory free")
            yield "warning", what, "in a container: --shm-size=1g; else clear /dev/shm of what ended runs left there"
        if here[0]["open_files"] < FEW_FILES:
            yield "warning", f"{host}: at most {here[0]['open_files']} open files", "ulimit -n 4096"


def _library(mpi: dict) -> str:
    if mpi["library"] is None:
        return "none"
    return library_name(mpi["library"]) + (f", {mpi['library_path']}" if mpi["library_path"] else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _megabytes(number: int) -> str:
    return f"{number / (1 << 20):.0f} MiB"
