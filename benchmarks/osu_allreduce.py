"""Microseconds of an all-reduce in place, by MPI or by the ring; `-f` has its bandwidth.

mpirun -n 4 python benchmarks/osu_allreduce.py
"""

import sys

import osu
import osu_collectives

TEST = osu.Test(
    name="osu_allreduce",
    title="OSU MPI Allreduce Latency Test",
    columns=("Avg Latency(us)",),
    prepare=osu_collectives.all_reduce,
    values=osu_collectives.latency,
    check=osu_collectives.check_all_reduce,
    algorithms=("mpi", "ring"),
    sizes=(4, 1 << 20),
    iterations=(1000, 100),
    warmup=(200, 10),
    reduces=True,
    bus=lambda ranks: 2 * (ranks - 1) / ranks,
    ranks="any",
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
