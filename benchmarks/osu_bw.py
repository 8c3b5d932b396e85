"""Bandwidth of a window of messages, from one rank to another.

mpirun -n 2 python benchmarks/osu_bw.py
"""

import sys
from functools import partial

import osu
import osu_pairs

TEST = osu_pairs.window_test(
    name="osu_bw",
    title="OSU MPI Bandwidth Test",
    columns=("Bandwidth (MB/s)",),
    prepare=osu_pairs.stream,
    values=osu_pairs.bandwidth,
    check=partial(osu_pairs.check, osu_pairs.stream),
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
