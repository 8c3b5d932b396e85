"""How long a checkpoint keeps training waiting: written at once, and from a copy with --checkpoint-async.

    mpirun -n 4 python benchmarks/checkpoint.py

A model under Adam whose state is --mebibytes over all ranks, which share out who writes what. `copy` is what all ranks
need to copy their own shares in memory, all at once; `async` the time in which --checkpoint-async keeps them from
training, `whole` that until the checkpoint is on disk, `sync` the same of one that is waited for. In turns, in one run;
a figure is the median over the turns of what the rank that took longest needed.
"""

import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import figures

SIDES = ("copy", "async", "whole", "sync")
SLOTS = 3  # numbers of a weight: itself and two of Adam
LAYERS = 8


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("checkpoint.py", __doc__.splitlines()[0], rank)
    parser.add_argument("--mebibytes", type=int, default=1024, metavar="N", help="of state; default: 1024")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--folder", metavar="PATH", help="where checkpoints go; default: that of temporary files")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    for flag, value in (("--mebibytes", flags.mebibytes), ("--turns", flags.turns)):
        if value < 1:
            raise ValueError(f"{flag} {value}: expected a whole number >= 1")
    return flags


def saving(mesh, folder: Path, nbytes: int):
    """Checkpoints of a model whose state has about so many bytes, and what each rank writes of it. Collective."""
    import torch
    from torch import nn

    from hpctrain.config import Config
    from hpctrain.train.build import build_executor
    from hpctrain.train.checkpoint import Checkpoints

    width = max(8, int((nbytes / SLOTS / 4 / LAYERS) ** 0.5))

    class Wide:
        def layers(self):
            return [lambda: nn.Linear(width, width, bias=False)] * LAYERS

        def loss(self, outputs, targets):
            return (outputs - targets).square().sum(), len(outputs)

        def dataset(self, split):
            return [(torch.ones(width), torch.zeros(width))] * mesh.size

    task = f"{__file__}:Wide"
    config = Config(task=task, global_batch_size=mesh.size, threads=1, optimizer="adam", num_microbatches=1)
    executor = build_executor(config, Wide(), mesh)
    executor.run_steps(0, 1)  # so that the optimizer has a state
    return Checkpoints(folder, replace(config, checkpoint_async=True, keep_checkpoints=1), executor, mesh)


def turn(checkpoints, mesh, progress) -> dict[str, float]:
    """Seconds of each side, on the rank that took longest. Collective."""
    pieces = [piece.values for piece in checkpoints.state.pieces()]
    found = {"copy": timed(mesh, lambda: [each.clone() for each in pieces])}
    progress.step += 1
    began = time.perf_counter()
    found["async"] = timed(mesh, lambda: checkpoints.save_or_tell(progress))
    checkpoints.finish()
    found["whole"] = max(mesh.world.all_gather_json(time.perf_counter() - began))
    progress.step += 1
    found["sync"] = timed(mesh, lambda: checkpoints.save(progress))
    return found


def timed(mesh, call) -> float:
    mesh.barrier()
    began = time.perf_counter()
    call()
    return max(mesh.world.all_gather_json(time.perf_counter() - began))


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what is wrong with them. Collective."""
    nbytes = flags.mebibytes << 20
    figures.check_memory("--mebibytes", 2 * nbytes, comm)  # state and gradients, and copies of the own share
    from hpctrain import Mesh
    from hpctrain.train.train_state import TrainState

    with Mesh(comm) as mesh:
        name = tempfile.mkdtemp(prefix="hpctrain-", dir=flags.folder) if mesh.rank == 0 else None
        folder = Path(mesh.world.broadcast_json(name))
        try:
            checkpoints, progress = saving(mesh, folder, nbytes), TrainState()
            turns = [turn(checkpoints, mesh, progress) for _ in range(flags.turns)]
        finally:
            if mesh.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        size, failed = mesh.world.broadcast_json([checkpoints.nbytes, checkpoints.num_failed])
    medians = {side: statistics.median(each[side] for each in turns) for side in SIDES}
    ratios = [each["async"] / each["copy"] for each in turns]
    ratio = statistics.median(ratios)
    tell(
        f"{mesh.size} ranks, {size / 2**20:.0f} MiB in all; " + ", ".join(f"{k} {v:.3f} s" for k, v in medians.items())
    )
    tell(f"async / copy {ratio:.2f}, {figures.told(ratios, 2)}")
    faults = [f"{failed} checkpoints failed"] if failed else []
    if flags.check and ratio > 2:
        faults.append(f"--checkpoint-async keeps training for {ratio:.2f} copies of the state in memory, not 2")
    return {"turns": turns, "bytes": size}, faults


if __name__ == "__main__":
    sys.exit(figures.main("checkpoint.py", parse, run, sys.argv[1:]))
