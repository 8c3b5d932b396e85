"""Microseconds of an all-gather of so many bytes from each rank, by MPI or by the ring.

mpirun -n 4 python benchmarks/osu_allgather.py
"""

import sys

import osu
import osu_collectives

TEST = osu_collectives.collective_test(
    name="osu_allgather",
    title="OSU MPI Allgather Latency Test",
    prepare=osu_collectives.all_gather,
    check=osu_collectives.check_all_gather,
    algorithms=("mpi", "ring"),
    sizes=(1, 1 << 20),
    arrays=lambda ranks: ranks,
    bus=lambda ranks: ranks - 1,
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
