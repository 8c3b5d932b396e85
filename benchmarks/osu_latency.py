"""Microseconds that a message takes one way, between two ranks.

mpirun -n 2 python benchmarks/osu_latency.py
"""

import sys
from functools import partial

import osu
import osu_pairs

TEST = osu.Test(
    name="osu_latency",
    title="OSU MPI Latency Test",
    columns=("Latency (us)",),
    prepare=osu_pairs.ping_pong,
    check=partial(osu_pairs.check, osu_pairs.ping_pong),
    sizes=(0, 4 << 20),
    latencies=2,
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
