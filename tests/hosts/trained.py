"""Several trainings in one launch, as torch takes longer to start than they take: python trained.py FOLDER.

Each is what `python -m hpctrain` with the same flags does, in a folder of its name.
"""

import sys
from pathlib import Path

from hpctrain import cli
from hpctrain.comm.abort import abort_on_error, leave
from hpctrain.comm.start import start_mpi

STEPS = ("--steps", "4", "--threads", "1")
TEXT = (*STEPS, "--task-option", "layers=2", "--task-option", "width=16", "--task-option", "context=16")
LAYOUTS = {
    "replicas": (*TEXT, "--allreduce", "ring"),
    "two levels": (*TEXT, "--allreduce", "windows"),  # between hosts another order of sums than on one
    "compressed": (*TEXT, "--allreduce", "ring", "--compress", "bf16"),
    "compressed in two levels": (*TEXT, "--compress", "bf16"),
    "largest": (*TEXT, "--compress", "topk:0.1"),
    "stages": (*TEXT, "--stages", "4"),
    "server": (*STEPS, "--task", "ratings", "--servers", "1"),
}


def main(folder: str) -> int:
    world = start_mpi()
    codes = (cli.main(["--run-dir", str(Path(folder, name)), *flags], world) for name, flags in LAYOUTS.items())
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    with abort_on_error():
        code = main(sys.argv[1])
    leave(code)
