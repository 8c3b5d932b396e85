"""Microseconds of a broadcast from rank 0.

mpirun -n 4 python benchmarks/osu_bcast.py
"""

import sys

import osu
import osu_collectives

TEST = osu.Test(
    name="osu_bcast",
    title="OSU MPI Broadcast Latency Test",
    columns=("Avg Latency(us)",),
    prepare=osu_collectives.broadcast,
    values=osu_collectives.latency,
    check=osu_collectives.check_broadcast,
    sizes=(1, 1 << 20),
    iterations=(1000, 100),
    warmup=(200, 10),
    bus=lambda ranks: 1,
    ranks="any",
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
