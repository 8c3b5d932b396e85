"""Microseconds of a reduce-scatter, by MPI or by the ring.

mpirun -n 4 python benchmarks/osu_reduce_scatter.py
"""

import sys

import osu
import osu_collectives

TEST = osu_collectives.collective_test(
    name="osu_reduce_scatter",
    title="OSU MPI Reduce_scatter Latency Test",
    prepare=osu_collectives.reduce_scatter,
    check=osu_collectives.check_reduce_scatter,
    algorithms=("mpi", "ring"),
    sizes=(4, 1 << 20),
    arrays=lambda ranks: 2,
    reduces=True,
    bus=lambda ranks: (ranks - 1) / ranks,
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
