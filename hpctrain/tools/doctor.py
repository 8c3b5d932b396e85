"""`hpctrain doctor`: what MPI, ranks and machine make of each other, before a run is lost to it.

It works where training does not: without a launcher, without an MPI library, without torch. What could crash (loading
an MPI library) happens in a process of its own, and only where no MPI runs: nothing is forked after MPI has started.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import hpctrain
from hpctrain.comm import environment
from hpctrain.config import Parser, UsageError, parse
from hpctrain.tools.diagnosis import exit_code, findings, report
from hpctrain.tools.gpus import gpu_facts, mpi_answers
from hpctrain.tools.outside import output, reason
from hpctrain.tools.proof import prove

LOAD_MPI = """
import json
from mpi4py import MPI
from hpctrain.comm.environment import mpi_library_path
from hpctrain.tools.gpus import mpi_answers
facts = [MPI.Get_library_version(), mpi_library_path(), MPI.Query_thread() >= MPI.THREAD_MULTIPLE]
print(json.dumps([*facts, mpi_answers(MPI.COMM_WORLD)]))
"""


def parser() -> Parser:
    top = Parser("hpctrain doctor", add_help=False, allow_abbrev=False)
    text = "end with code 1 where a rank that trains has no device, or torch cannot use it"
    top.add_argument("--require", choices=("cuda",), metavar="cuda", help=text)
    text = "have two ranks exchange device memory, in a job of their own; without mpirun"
    top.add_argument("--prove", action="store_true", help=text)
    top.epilog = "also the flags of train, such as --run-dir and --servers"
    return top


def run(argv: list[str], world) -> int:
    """Prints facts, problems and their cures. Returns 0, 1 when a problem stops training or what is required is not
    there, 2 for a wrong command line.

    `argv` may hold any flag of training. `world` is an mpi4py communicator, None where no MPI was started. Collective.
    """
    try:
        flags, rest = parser().parse_known_args(argv)
        config = parse(rest)[0]
        if flags.prove and world is not None:
            raise UsageError("--prove: it starts two ranks of its own; leave out mpirun, on a host with a device")
    except ValueError as error:
        if world is None or world.rank == 0:
            print(f"hpctrain doctor: {error}", file=sys.stderr)
        return 2
    run_dir, required = config.run_dir or "runs", flags.require is not None
    if world is not None:
        return _run_together(run_dir, config.servers, required, world)
    mpi = mpi_alone()
    if environment.announced(os.environ).rank not in (None, 0):
        return 0
    facts = rank_facts(run_dir)
    if flags.prove:
        mpi["proof"] = prove(facts["gpu"], mpi)
    return _tell([facts], mpi, required)


def rank_facts(run_dir: str, node: int = 0, is_server: bool = False) -> dict:
    """What one rank knows about its host (bytes, numbers of cores and files), as JSON can hold it.

    `node` is the same on ranks that share memory.
    """
    return {
        "host": socket.gethostname(),
        "node": node,
        "is_server": is_server,
        "gpu": gpu_facts(os.environ, is_server),
        "cores": environment.cores_allowed(),
        "shared_memory_free": environment.shared_memory_free(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "run_dir": str(Path(run_dir).absolute()),
        "run_dir_error": write_error(Path(run_dir).absolute()),
    }


def mpi_facts(**changes) -> dict:
    """The software around a run: versions, launcher, mpirun, and of the MPI library what `changes` brings."""
    versions = {"hpctrain": hpctrain.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in ("numpy", "torch", "mpi4py")}
    known_later = ("library", "library_path", "thread_multiple", "mpirun_vendor", "error", "world_error", "proof")
    switch = os.environ.get(environment.SWITCH)
    launcher = environment.announced(os.environ).launcher + (f", but {environment.SWITCH}={switch}" if switch else "")
    facts = {"versions": versions, "launcher": launcher, "mpirun": _mpirun(), "cuda_aware": [None]}
    return {**facts, **dict.fromkeys(known_later), **changes}


def mpi_running(world, answers: list) -> dict:
    """Facts of the MPI that this process is part of; `answers` of every rank to whether it is CUDA-aware."""
    from mpi4py import MPI

    library = MPI.Get_library_version()
    return mpi_facts(
        library=library,
        library_path=environment.mpi_library_path(),
        thread_multiple=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        world_error=_refusal(environment.check_world, world.size, library),
        cuda_aware=answers,
    )


def mpi_alone() -> dict:
    """Facts of the MPI that would be started."""
    if _version("mpi4py") is None:
        return mpi_facts()
    try:
        library, path, multiple, answers = json.loads(output([sys.executable, "-c", LOAD_MPI]).splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return mpi_facts(error=reason(error))
    return mpi_facts(
        library=library,
        library_path=path,
        thread_multiple=multiple,
        mpirun_vendor=_mpirun_vendor(),
        world_error=_refusal(environment.check_launcher, library),
        cuda_aware=[answers],
    )


def write_error(folder: Path) -> str | None:
    """Why nothing can be written into `folder`, or into the one that it would be made in; None: something can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
    except OSError as error:
        return error.strerror
    return None


def _tell(ranks: list[dict], mpi: dict, required: bool) -> int:
    print("\n".join(report(ranks, mpi, required)))
    return exit_code(findings(ranks, mpi, required))


def _run_together(run_dir: str, num_servers: int, required: bool, world) -> int:
    from hpctrain.comm.group import Group
    from hpctrain.comm.mesh import duplicate
    from hpctrain.comm.shared_memory import name_of_node

    group = Group(duplicate(world))
    is_server = world.rank > 0 and world.rank >= world.size - num_servers
    ranks = group.gather_json(rank_facts(run_dir, name_of_node(), is_server))
    answers = group.gather_json(mpi_answers(world))
    told = None if ranks is None else _tell(ranks, mpi_running(world, answers), required)
    code = group.broadcast_json(told)
    group.close()
    return code


def _refusal(check, *facts) -> str | None:
    """What a check of the launcher's announcement has to say."""
    try:
        check(environment.announced(os.environ), *facts)
    except ValueError as error:
        return str(error)
    return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _mpirun() -> str | None:
    """The mpirun that a user's shell finds, else the one beside this interpreter."""
    beside = Path(sys.executable).with_name("mpirun")
    return shutil.which("mpirun") or (str(beside) if beside.exists() else None)


def _mpirun_vendor() -> str | None:
    try:
        return environment.vendor(output([_mpirun(), "--version"])) if _mpirun() else None
    except (OSError, subprocess.SubprocessError):
        return None
