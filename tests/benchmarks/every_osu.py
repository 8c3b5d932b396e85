"""All OSU-style benchmarks in one launch: `mpirun -n N python every_osu.py`; those that N ranks fit."""

import runpy
import sys
from pathlib import Path

from hpctrain.comm.start import join_launch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def main() -> int:
    comm = join_launch()
    for script in sorted(BENCHMARKS.glob("osu_*.py")):
        test = runpy.run_path(str(script)).get("TEST")
        if test is None or test.ranks == "two" and comm.size != 2 or test.ranks == "pairs" and comm.size % 2:
            continue
        size = ["-m", "20:9000"] if test.sizes else []
        for algorithm in [each for each in test.algorithms if each != "host"]:  # which copies from a device
            check = ["-c"] if test.check else []
            argv = [*size, "-i", "2", "-x", "1", "-f", *check, "--algorithm", algorithm, "--json", f"{test.name}.json"]
            if code := sys.modules["osu"].main(test, argv):
                print(f"{test.name} --algorithm {algorithm}: {code}", file=sys.stderr)
                return code
    assert "torch" not in sys.modules
    return 0


if __name__ == "__main__":
    sys.exit(main())
