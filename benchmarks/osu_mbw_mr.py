"""As osu_bw, between all pairs of ranks at once; messages a second besides.

mpirun -n 4 python benchmarks/osu_mbw_mr.py
"""

import sys
from functools import partial

import osu
import osu_pairs

TEST = osu_pairs.window_test(
    name="osu_mbw_mr",
    title="OSU MPI Multiple Bandwidth / Message Rate Test",
    columns=("MB/s", "Messages/s"),
    prepare=osu_pairs.stream,
    values=osu_pairs.bandwidth_and_messages,
    check=partial(osu_pairs.check, osu_pairs.stream),
    ranks="pairs",
)

if __name__ == "__main__":
    sys.exit(osu.main(TEST))
