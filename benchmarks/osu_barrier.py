"""Microseconds of a barrier, by MPI or by hpctrain.

mpirun -n 4 python benchmarks/osu_barrier.py
"""

import sys

import osu
import osu_collectives

TEST = osu_collectives.collective_test(
    name="osu_barrier",
    title="OSU MPI Barrier Latency Test",
    prepare=osu_collectives.barrier,
    algorithms=("mpi", "ring"),
    sizes=None,
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
