"""An all-reduce by hpctrain, in shared memory and by messages, by MPI_Allreduce and by gloo: in turns, in one run.

    mpirun -n 8 python benchmarks/peers/allreduce.py

float32, in place, in the same memory: one arena as training has it, which the ranks of a node share. Each rank keeps to
a core. The sums of each side are looked at before anything is measured; then zeros are added up. A figure is the median
over the pairs of what the rank that took longest needed for a call. gloo is that of torch.distributed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import above  # noqa: F401
import figures

if TYPE_CHECKING:
    import torch

    from hpctrain import Mesh


SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
SECONDS = 0.1  # that the calls of a side may take, about, at 1 GB/s
SIDES = ("windows", "ring", "mpi", "gloo")

HEADER = (
    f"{'bytes':>10}{'windows':>13}{'ring':>13}{'MPI':>13}{'gloo':>13}"
    f"{'MPI / win':>11}{'gloo / win':>12}{'MPI / ring':>12}   interval of min(MPI, gloo) / win"
)


def goal(side: str, nbytes: int, num_ranks: int) -> float | None:
    """How many times as long the faster peer must take, for windows; MPI_Allreduce, for the ring."""
    if side == "ring":
        return 1.8 if nbytes >= 64 << 20 else None
    if nbytes >= 1 << 20:
        return 2.5 if nbytes == 16 << 20 and num_ranks == 4 else 3.0
    return 1.0 if nbytes >= 64 << 10 else 0.85


def sides(mesh: Mesh, values: torch.Tensor) -> dict[str, Callable[[], None]]:
    """What adds `values` up over all ranks, in place, by name."""
    import torch.distributed as dist
    from mpi4py import MPI

    from hpctrain import AllReduce

    array = values.numpy()
    ours = {name: AllReduce(mesh, algorithm=name).prepare(values, name).run for name in ("windows", "ring")}
    return {
        **ours,
        "mpi": lambda: mesh.world.comm.Allreduce(MPI.IN_PLACE, array),
        "gloo": lambda: dist.all_reduce(values),
    }


def wrong(mesh: Mesh, values: torch.Tensor, call: Callable[[], None]) -> int:
    """Elements that are not the sum, on any rank. Collective."""
    import torch

    pattern = (torch.arange(len(values)) % 251 + 1).float()
    values.copy_(pattern * (mesh.rank + 1))
    call()
    bad = int((values != pattern * (mesh.size * (mesh.size + 1) // 2)).sum())
    values.zero_()
    return sum(mesh.world.all_gather_json(bad))


def seconds_of(call: Callable[[], None], repeats: int, mesh: Mesh) -> float:
    """Of one call, on the rank that took longest. Collective."""
    call()
    mesh.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return max(mesh.world.all_gather_json(time.perf_counter() - began)) / repeats


def measure(flags, mesh: Mesh, nbytes: int) -> dict:
    """Pairs of one size, or the sides that are wrong. Collective."""
    import torch

    from hpctrain import AllReduce

    memory = torch.from_numpy(AllReduce(mesh).empty(nbytes // 4))
    calls = sides(mesh, memory)
    bad = {name: count for name, call in calls.items() if (count := wrong(mesh, memory, call))}
    if bad:
        return {"bytes": nbytes, "wrong": bad, "pairs": []}
    repeats = max(2, min(200, int(SECONDS * 1e9 / nbytes / mesh.size)))
    pairs = []
    for number in range(flags.pairs):
        order = list(calls) if number % 2 == 0 else list(reversed(calls))
        pairs.append({name: seconds_of(calls[name], repeats, mesh) for name in order})
    return {"bytes": nbytes, "wrong": {}, "pairs": pairs}


def ratios(row: dict, peers: tuple[str, ...], side: str) -> list[float]:
    """How many times as long the faster one of the peers took, pair by pair."""
    return [min(pair[peer] for peer in peers) / pair[side] for pair in row["pairs"]]


def line(row: dict) -> str:
    if row["wrong"]:
        return f"{row['bytes']:>10}  wrong elements: {row['wrong']}"
    medians = {name: statistics.median(pair[name] for pair in row["pairs"]) for name in SIDES}
    seconds = "".join(f"{1e6 * medians[name]:>10.0f} us" for name in SIDES)
    columns = (("mpi", "windows", 11), ("gloo", "windows", 12), ("mpi", "ring", 12))
    told = "".join(f"{statistics.median(ratios(row, (peer,), side)):>{width}.2f}" for peer, side, width in columns)
    return f"{row['bytes']:>10}{seconds}{told}   {figures.told(ratios(row, ('mpi', 'gloo'), 'windows'), 2)}"


def faults(rows: list[dict], num_ranks: int, checks: bool) -> list[str]:
    """Wrong sums, and with --check what the goals ask for."""
    found = [f"{row['bytes']} bytes: wrong elements: {row['wrong']}" for row in rows if row["wrong"]]
    for row in rows if checks else ():
        for side, peers in (("windows", ("mpi", "gloo")), ("ring", ("mpi",))):
            wanted = goal(side, row["bytes"], num_ranks)
            if wanted and row["pairs"] and (ratio := statistics.median(ratios(row, peers, side))) < wanted:
                faster = "MPI_Allreduce" if side == "ring" else "the faster of MPI_Allreduce and gloo"
                found.append(f"{row['bytes']} bytes: {faster} takes {ratio:.2f} times as long as {side}, not {wanted}")
    return found


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("allreduce.py", __doc__.splitlines()[0], rank)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), metavar="B,B", help="bytes; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the times over the bytes there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if num_ranks < 2:
        raise ValueError("one rank adds nothing up; start it by mpirun -n 2")
    if flags.pairs < 1:
        raise ValueError(f"--pairs {flags.pairs}: expected a whole number >= 1")
    sizes = flags.sizes.split(",")
    if not all(size.isdecimal() and int(size) >= 4 and int(size) % 4 == 0 for size in sizes):
        raise ValueError(f"--sizes {flags.sizes}: expected multiples of 4, such as 4096,65536")
    flags.sizes = [int(size) for size in sizes]
    return flags


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what is wrong with them. Collective."""
    figures.check_memory("--sizes", sum(flags.sizes) + 4 * max(flags.sizes), comm)  # the last of them to look at sums
    import torch
    from sides import start_torch

    from hpctrain import Mesh

    num_cores = figures.pin(comm.rank)  # before gloo has threads
    with Mesh(comm) as mesh:
        start_torch(mesh)
        tell(f"{mesh.size} ranks, {num_cores} cores; float32, in place; torch {torch.__version__}")
        tell(HEADER, flush=True)
        rows = []
        for nbytes in flags.sizes:
            rows.append(measure(flags, mesh, nbytes))
            tell(line(rows[-1]), flush=True)
        torch.distributed.destroy_process_group()
        found = mesh.world.broadcast_json(faults(rows, mesh.size, flags.check))
    if flags.plot and comm.rank == 0:
        draw([row for row in rows if row["pairs"]], flags.plot)
    return {"rows": rows}, found


def draw(rows: list[dict], file: str) -> None:
    """Medians of each side over the bytes."""
    from matplotlib.figure import Figure

    figure = Figure((7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="bytes", ylabel="seconds", yscale="log")
    axes.set_xscale("log", base=2)
    for side, label in zip(SIDES, ("hpctrain, shared memory", "hpctrain, ring", "MPI_Allreduce", "gloo")):
        medians = [statistics.median(pair[side] for pair in row["pairs"]) for row in rows]
        axes.plot([row["bytes"] for row in rows], medians, marker=".", label=label)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    sys.exit(figures.main("allreduce.py", parse, run, sys.argv[1:]))
