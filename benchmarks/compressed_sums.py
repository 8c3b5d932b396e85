"""An all-reduce whose messages carry bfloat16 beside one of the numbers as they are: where does it pay?

    mpirun -n 8 -hosts node1,node2,node3,node4 python benchmarks/compressed_sums.py

float32, in place, both in turns in one run; a figure is what the rank that took longest needed. On one host both go
along the ring, which is there to be seen, not to be used: sums in shared memory send nothing.
"""

import os
import statistics
import sys
import time

import figures
import numpy as np

from hpctrain import AllReduce, Mesh

SIDES = ("none", "bf16")
HEADER = f"{'bytes':>10}{'none':>12}{'bf16':>12}{'bf16 / none':>13}{'with certainty':>26}"


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("compressed_sums.py", __doc__.splitlines()[0], rank)
    sizes = [1 << 18, 1 << 20, 1 << 24]
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes, metavar="B", help="of arrays")
    parser.add_argument("--pairs", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    flags = parser.parse_args(argv)
    if num_ranks < 2:
        raise ValueError("one rank sends nothing; start it by mpirun -n 2")
    if flags.pairs < 1:
        raise ValueError(f"--pairs {flags.pairs}: expected a whole number >= 1")
    if any(each < 4 or each % 4 for each in flags.bytes):
        raise ValueError(f"--bytes {' '.join(map(str, flags.bytes))}: expected multiples of 4")
    return flags


def wrong(mesh: Mesh, array: np.ndarray, call) -> int:
    """Elements further from the sum than they may be, on any rank. Collective."""
    pattern = np.arange(len(array), dtype=np.float32) % 251
    array[:] = pattern * (mesh.rank + 1)
    call()
    exact = pattern * (mesh.size * (mesh.size + 1) // 2)
    bad = int((np.abs(array - exact) > mesh.size * 2.0**-8 * exact).sum())
    array[:] = 0
    return sum(mesh.world.all_gather_json(bad))


def seconds_of(call, mesh: Mesh) -> float:
    """Of a call, on the rank that took longest. Collective."""
    mesh.barrier()
    began = time.perf_counter()
    call()
    return max(mesh.world.all_gather_json(time.perf_counter() - began))


def line(nbytes: int, pairs: list[dict]) -> str:
    none, bf16 = (f"{1e3 * statistics.median(pair[side] for pair in pairs):.2f} ms" for side in SIDES)
    ratios = [pair["bf16"] / pair["none"] for pair in pairs]
    return f"{nbytes:>10}{none:>12}{bf16:>12}{statistics.median(ratios):>13.2f}{figures.told(ratios, 2):>26}"


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what is wrong with them. Collective."""
    import torch  # noqa: F401 - which converts where it is loaded, as in training

    found: dict = {}
    figures.check_memory("--bytes", 6 * max(flags.bytes), comm)  # of both sides, and what they are compared with
    with Mesh(comm) as mesh:
        algorithm = "auto" if len(set(mesh.world.all_gather_json(os.uname().nodename))) > 1 else "ring"
        tell(f"{mesh.size} ranks; {algorithm}; float32, in place", HEADER, sep="\n", flush=True)
        for nbytes in flags.bytes:
            calls = {}
            for side in SIDES:
                reduce = AllReduce(mesh, algorithm=algorithm, compress=side)
                array = np.zeros(nbytes // 4, np.float32)
                calls[side] = reduce.prepare(array, side).run
                if bad := wrong(mesh, array, calls[side]):
                    return {}, [f"{side}: {bad} wrong elements"]
            found[nbytes] = []
            for number in range(flags.pairs):
                order = SIDES if number % 2 == 0 else SIDES[::-1]
                found[nbytes].append({side: seconds_of(calls[side], mesh) for side in order})
            tell(line(nbytes, found[nbytes]), flush=True)
    return {"pairs": found}, []


if __name__ == "__main__":
    sys.exit(figures.main("compressed_sums.py", parse, run, sys.argv[1:]))
