"""As osu_latency, between all pairs of ranks at once.

mpirun -n 4 python benchmarks/osu_multi_lat.py
"""

import sys
from functools import partial

import osu
import osu_pairs

TEST = osu.Test(
    name="osu_multi_lat",
    title="OSU MPI Multi Latency Test",
    columns=("Latency (us)",),
    prepare=osu_pairs.ping_pong,
    check=partial(osu_pairs.check, osu_pairs.ping_pong),
    sizes=(0, 4 << 20),
    iterations=(1000, 100),
    latencies=2,
    ranks="pairs",
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
