"""What the launcher's variables say, to be held against what MPI says; and what this machine gives a rank.

A launcher that does not fit the MPI library does not fail: every process becomes rank 0 of a world of one, and n copies
train the same model into the same files. Only the environment shows it. Which variables may be trusted was tried with
srun (none, pmi2, pmix) and with mpirun inside and outside of a Slurm job: under mpirun Slurm's variables describe the
daemon that started the rank, and in a batch shell SLURM_NTASKS describes the job. So they come last, and only from a
step. Functions take the environment as a mapping: nothing here looks at os.environ by itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MPIRUN_MPICH, MPIRUN_OPENMPI, SRUN = "mpirun of MPICH", "mpirun of Open MPI", "srun"
SHARED_MEMORY = "/dev/shm"
SIZES = (  # variable with the number of ranks, with this rank, and who sets both; the first that is there counts
    ("PMI_SIZE", "PMI_RANK", MPIRUN_MPICH),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", MPIRUN_OPENMPI),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun of MVAPICH2"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun"),
)
SRUN_OPTION = {"MPICH": "pmi2", "Open MPI": "pmix"}  # what srun needs to reach this library
SWITCH = "HPCTRAIN_MPI"
MITIGATION = "OMPI_MCA_mpi_ft_enable"  # set for its ranks by Open MPI's `mpirun --with-ft ulfm`


@dataclass(frozen=True)
class Announced:
    """`size` ranks of which this is `rank`, as `variable` of `launcher` says; None: nothing that can be trusted."""

    size: int | None
    rank: int | None
    variable: str | None
    launcher: str


def announced(environ: Mapping[str, str]) -> Announced:
    """What the launcher says about the world that this process belongs to."""
    for size, rank, launcher in SIZES:
        if (number := _number(environ, size)) is not None:
            if launcher == MPIRUN_MPICH and _is_srun(environ):
                launcher = SRUN
            return Announced(number, _number(environ, rank), size, launcher)
    if "PMIX_RANK" in environ:  # Slurm's variables would describe the daemon between srun and this rank
        launcher = SRUN if environ.get("PMIX_NAMESPACE", "").startswith("slurm.") else "a PMIx launcher"
        return Announced(None, _number(environ, "PMIX_RANK"), None, launcher)
    return _announced_by_slurm(environ)


def is_mitigating(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI was started so that ranks may be lost."""
    return environ.get(MITIGATION, "0").lower() in ("1", "true", "yes")


def wants_mpi(environ: Mapping[str, str]) -> bool:
    """Whether this process has to start MPI. HPCTRAIN_MPI=0 or 1 decides it; ValueError for any other value of it."""
    switch = environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={switch}: it is 0 (run alone), 1 (start MPI), or not set")
    if switch:
        return switch == "1"
    said = announced(environ)
    alone_in_slurm = said.launcher == SRUN and said.size == 1  # a step of one task needs no MPI
    return said.launcher != "none" and not alone_in_slurm


def check_launcher(said: Announced, library_version: str) -> None:
    """ValueError when Open MPI's mpirun started a rank that loaded MPICH: MPI_Init would end it unexplained."""
    if said.launcher == MPIRUN_OPENMPI and vendor(library_version) == "MPICH":
        raise ValueError(
            f"{said.launcher} started {said.size} ranks, but mpi4py loaded {_loaded(library_version)}; "
            f"start with the mpirun of MPICH, or set {SWITCH}=1 to try all the same"
        )


def check_world(said: Announced, size: int, library_version: str) -> None:
    """ValueError when MPI's world of `size` ranks is smaller than announced: its ranks do not know of each other."""
    if said.size is None or size >= said.size:
        return
    copies = "every rank would train alone" if size == 1 else "ranks are missing"
    raise ValueError(
        f"{said.launcher} started {said.size} ranks ({said.variable}), but MPI's world has {size}: {copies}. "
        f"mpi4py loaded {_loaded(library_version)}; {_cure(said.launcher, library_version)}"
    )


def library_name(library_version: str) -> str:
    """`MPICH 5.0.2`, `Open MPI v5.0.11`: the short name in what MPI_Get_library_version gives."""
    words = library_version.replace("\0", "").splitlines()[0].split(",")[0].split()
    return " ".join(word for word in words if word != "Version:")


def vendor(library_version: str) -> str:
    """`MPICH`, `Open MPI`, or the first word of another library's name; for `mpirun --version` too."""
    if "Open MPI" in library_version or "OpenRTE" in library_version:
        return "Open MPI"
    return "MPICH" if "MPICH" in library_version or "HYDRA" in library_version else library_version.split()[0]


def mpi_library_path() -> str | None:
    """The MPI library that this process has loaded, None where it has not (or where /proc is missing)."""
    names = ("libmpi.", "libmpich.", "libmpi_")
    paths = (path for path in libraries_loaded() if Path(path).name.startswith(names))
    return next((path for path in paths if "libmpi_gtl" not in path), None)  # Cray's link to devices is no MPI


def libraries_loaded() -> list[str]:
    """The files that are mapped into this process."""
    return list(dict.fromkeys(line.split()[-1] for line in _lines("/proc/self/maps") if "/" in line))


def cores_allowed() -> list[int]:
    """The cores that this process may use: its affinity mask, cut to what its control group's quota pays for."""
    cores = sorted(os.sched_getaffinity(0))
    quota = min(_quotas(), default=len(cores))
    return cores[: max(1, int(quota))]


def threads_per_rank(places: Iterable[tuple[str, Iterable[int]]]) -> int:
    """Threads that every rank can have; `places` holds each rank's host and its `cores_allowed`.

    Launchers give the ranks of a host the same cores, or each its own: what counts is how many they have together.
    """
    cores: dict[str, set[int]] = {}
    ranks: dict[str, int] = {}
    for host, allowed in places:
        cores.setdefault(host, set()).update(allowed)
        ranks[host] = ranks.get(host, 0) + 1
    return min(max(1, len(cores[host]) // ranks[host]) for host in ranks)


def crowding(places: Iterable[tuple[str, Iterable[int]]], num_threads: int) -> str | None:
    """A line where ranks of so many threads each have more of them than cores, else None; `places` as above."""
    fitting = threads_per_rank(places)
    if num_threads <= fitting:
        return None
    return (
        f"{num_threads} threads a rank (--threads, OMP_NUM_THREADS), and cores for {fitting}: --threads {fitting} is"
        " faster; where mpirun has bound each rank to one core, --bind-to none leaves it all"
    )


def shared_memory_free(folder: str = SHARED_MEMORY) -> int | None:
    """Bytes free for shared memory, None where there is none."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _announced_by_slurm(environ: Mapping[str, str]) -> Announced:
    rank = _number(environ, "SLURM_PROCID")
    if (size := _number(environ, "SLURM_STEP_NUM_TASKS")) is not None:
        return Announced(size, rank, "SLURM_STEP_NUM_TASKS", SRUN)
    size = _number(environ, "SLURM_NTASKS")
    if rank and size and size > 1:  # a batch shell has SLURM_NTASKS too, but it is always task 0
        return Announced(size, rank, "SLURM_NTASKS", SRUN)
    return Announced(None, None, None, "none")


def _is_srun(environ: Mapping[str, str]) -> bool:
    """PMI_SIZE comes from srun, not from MPICH's mpirun (which srun may have started: it leaves its own marks)."""
    return "SLURM_STEP_ID" in environ and not {"HYDI_CONTROL_FD", "MPI_LOCALNRANKS"} & environ.keys()


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _loaded(library_version: str) -> str:
    path = mpi_library_path()
    return library_name(library_version) + (f" ({path})" if path else "")


def _cure(launcher: str, library_version: str) -> str:
    name = vendor(library_version)
    if launcher == SRUN:
        start = f"srun --mpi={SRUN_OPTION.get(name, 'pmix or pmi2')} (see srun --mpi=list)"
    else:
        start = f"the mpirun of {name}" + (" itself" if launcher.endswith(name) else "")
    return f"start with {start}, or set {SWITCH}=0 to run separate copies on purpose"


def _quotas() -> list[float]:
    """Cores by the processor quotas of this process's control groups and of those above it, versions 1 and 2."""
    quotas = []
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = Path("/sys/fs/cgroup/cpu" if controllers else "/sys/fs/cgroup")
        own = base / path.lstrip("/")
        quotas += [_quota(folder) for folder in (own, *own.parents) if folder.is_relative_to(base)]
    return [quota for quota in quotas if quota]


def _quota(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")).split()
    words = words or _lines(folder / "cpu.cfs_quota_us") + _lines(folder / "cpu.cfs_period_us")
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _lines(path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
