"""As osu_bw, in both directions at once.

mpirun -n 2 python benchmarks/osu_bibw.py
"""

import sys
from functools import partial

import osu
import osu_pairs

TEST = osu_pairs.window_test(
    name="osu_bibw",
    title="OSU MPI Bi-Directional Bandwidth Test",
    columns=("Bandwidth (MB/s)",),
    prepare=osu_pairs.exchange,
    values=partial(osu_pairs.bandwidth, directions=2),
    check=partial(osu_pairs.check, osu_pairs.exchange),
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
