"""Microseconds of a barrier, by MPI or by hpctrain.

mpirun -n 4 python benchmarks/osu_barrier.py
"""

import sys

import osu
import osu_collectives

TEST = osu.Test(
    name="osu_barrier",
    title="OSU MPI Barrier Latency Test",
    columns=("Avg Latency(us)",),
    prepare=osu_collectives.barrier,
    values=osu_collectives.latency,
    algorithms=("mpi", "ring"),
    sizes=None,
    iterations=(1000, 100),
    warmup=(200, 10),
    ranks="any",
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
