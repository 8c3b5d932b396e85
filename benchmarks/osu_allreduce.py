"""Microseconds of an all-reduce in place, by MPI, by the ring or in shared memory; `-f` has its bandwidth.

Of memory on a device by MPI that takes it, by the ring, or by MPI through the host.

mpirun -n 4 python benchmarks/osu_allreduce.py
"""

import sys

import osu
import osu_collectives

TEST = osu_collectives.collective_test(
    name="osu_allreduce",
    title="OSU MPI Allreduce Latency Test",
    prepare=osu_collectives.all_reduce,
    ready=osu_collectives.join_ranks,
    check=osu_collectives.check_all_reduce,
    algorithms=("mpi", "auto", "ring", "doubling", "windows", "host"),
    sizes=(4, 1 << 20),
    reduces=True,
    bus=lambda ranks: 2 * (ranks - 1) / ranks,
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
