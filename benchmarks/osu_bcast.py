"""Microseconds of a broadcast from rank 0.

mpirun -n 4 python benchmarks/osu_bcast.py
"""

import sys

import osu
import osu_collectives

TEST = osu_collectives.collective_test(
    name="osu_bcast",
    title="OSU MPI Broadcast Latency Test",
    prepare=osu_collectives.broadcast,
    check=osu_collectives.check_broadcast,
    sizes=(1, 1 << 20),
    bus=lambda ranks: 1,
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
