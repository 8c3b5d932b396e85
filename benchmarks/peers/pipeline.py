"""A small GPT on two stages, trained by hpctrain and by torch.distributed.pipelining in the same run.

    mpirun -n 2 python benchmarks/peers/pipeline.py

Both have the same layers on the same stages, the same weights, rows, loss and optimizer, the same 1F1B and the same
micro-batches; two steps of each show it before anything is measured. Each rank is pinned to a core of its own, with one
torch thread. hpctrain's messages go over MPI, torch's over gloo: PipelineStage and Schedule1F1B as its tutorial has
them, without return values that nobody asked for. Its schedule sends and receives in pairs, and waits for both before
it computes; gloo moves them through sockets, with a thread of its own on the rank's core. hpctrain in turn looks at
every gradient for NaN and tells each rank the loss, which torch does not.

The ideal is T1 / 2 * (m + 1) / m: half of the time that one rank alone takes for all layers, and the bubble of 1F1B.
That rank has the machine for itself, so two ranks that share caches and memory cannot quite reach it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import above  # noqa: F401
import figures

if TYPE_CHECKING:
    import torch
    from sides import Ours, Torchs

    from hpctrain import Mesh


VOCABULARY = 256
RATIO, SHARE = 1.1, 0.85  # what --check asks for
TOLERANCE = 1e-5  # of losses, gradients and weights, relative to the largest of a tensor

HEADER = (
    f"{'pair':<6}{'hpctrain':>12}{'torch':>12}{'alone':>12}{'ideal':>12}{'torch / hpctrain':>19}{'of the ideal':>14}"
)


def differences(ours: Ours, torchs: Torchs, batches: list, mesh: Mesh) -> dict[str, float]:
    """The largest of losses, gradients and weights in two steps from the same weights. Collective."""
    found = {"losses": 0.0, "gradients": 0.0, "weights": 0.0}
    for inputs, targets in batches[:2]:
        loss, other = ours.step(inputs, targets), torchs.step(inputs, targets)
        if other is not None:
            found["losses"] = max(found["losses"], abs(loss / other - 1))
        for what, mine, theirs in zip(("weights", "gradients"), ours.tensors(), torchs.tensors()):
            assert mine.keys() == theirs.keys(), (mine.keys(), theirs.keys())
            found[what] = max(found[what], *(distance(mine[name], theirs[name]) for name in mine))
    told = mesh.world.all_gather_json(found)
    return {what: max(each[what] for each in told) for what in found}


def distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference as a share of the largest number, infinite where something is NaN."""
    share = float((mine - theirs).abs().max() / theirs.abs().max())
    return share if math.isfinite(share) else math.inf


def seconds_of(step: Callable | None, batches: list, num_steps: int, mesh: Mesh) -> float:
    """Of one step, by the rank that took longest; without `step` this rank only waits. Collective."""
    mesh.barrier()
    mesh.barrier()  # a short wait ends on time
    began = time.perf_counter()
    for number in range(num_steps if step else 0):
        step(*batches[number % len(batches)])
    return max(mesh.world.all_gather_json(time.perf_counter() - began)) / num_steps


def measure(flags: argparse.Namespace, mesh: Mesh, tell: Callable) -> dict:
    """Differences, then seconds of a step in each pair, by who made it; no pairs where they differ. Collective."""
    from sides import Alone, Ours, Torchs

    from hpctrain.tasks.gpt import layer_factories

    factories = layer_factories(flags.blocks, flags.width, flags.heads, flags.context, 0.0, VOCABULARY)
    batches = make_batches(flags)
    ours = Ours(factories, flags, mesh)
    torchs = Torchs(factories, flags, mesh, ours)
    alone = Alone(factories, flags) if mesh.rank == 0 else None
    found = differences(ours, torchs, batches, mesh)
    tell("after two steps they differ by " + ", ".join(f"{value:.0e} in {what}" for what, value in found.items()))
    if max(found.values()) > TOLERANCE:
        return {"differences": found, "pairs": []}
    tell(HEADER, flush=True)
    steps = {"hpctrain": ours.step, "torch": torchs.step, "alone": alone and alone.step}
    seconds_of(steps["alone"], batches, 1, mesh)
    pairs = []
    for number in range(flags.pairs):
        order = ("hpctrain", "torch", "alone") if number % 2 == 0 else ("alone", "torch", "hpctrain")
        pair = {name: seconds_of(steps[name], batches, flags.steps, mesh) for name in order}
        pairs.append(with_ratios(pair, flags.microbatches))
        tell(line(number + 1, pairs[-1]), flush=True)
    return {"differences": found, "pairs": pairs}


def make_batches(flags: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of some steps, the same on all ranks."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8, flags.batch_size, flags.context + 1), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def with_ratios(pair: dict[str, float], num_microbatches: int) -> dict[str, float]:
    """The seconds of a pair, and what follows from them."""
    ideal = pair["alone"] / 2 * (num_microbatches + 1) / num_microbatches
    return {**pair, "ideal": ideal, "ratio": pair["torch"] / pair["hpctrain"], "share": ideal / pair["hpctrain"]}


def line(number: int, pair: dict[str, float]) -> str:
    seconds = "".join(f"{1000 * pair[name]:>9.1f} ms" for name in ("hpctrain", "torch", "alone", "ideal"))
    return f"{number:<6}{seconds}{pair['ratio']:>19.3f}{pair['share']:>14.1%}"


def summary(pairs: list[dict[str, float]]) -> list[str]:
    told = []
    if not pairs:
        return ["not measured, since they differ"]
    for what, key in (("torch / hpctrain", "ratio"), ("hpctrain of the ideal", "share")):
        values = [pair[key] for pair in pairs]
        told.append(f"{what}: {statistics.median(values):.3f}, with {figures.told(values, 3)}")
    return told


def faults(result: dict) -> list[str]:
    """What --check finds. Without it a difference is a fault too."""
    found = [f"{what} differ by {value:.1e}" for what, value in result["differences"].items() if value > TOLERANCE]
    if found:
        return found
    medians = {key: statistics.median(pair[key] for pair in result["pairs"]) for key in ("ratio", "share")}
    if medians["ratio"] < RATIO:
        found.append(f"torch takes {medians['ratio']:.3f} times as long, at least {RATIO} was asked for")
    if medians["share"] < SHARE:
        found.append(f"{medians['share']:.1%} of the ideal, at least {SHARE:.0%} was asked for")
    return found


def parse(argv: list[str], num_ranks: int, rank: int = 0) -> argparse.Namespace:
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("pipeline.py", __doc__.splitlines()[0], rank)
    sizes = {"blocks": 4, "width": 256, "heads": 4, "context": 128, "batch-size": 32, "microbatches": 8}
    for name, default in {**sizes, "pairs": 7, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if num_ranks != 2:
        raise ValueError(f"{num_ranks} rank{'s' * (num_ranks != 1)}; start it by mpirun -n 2")
    for name in (*sizes, "pairs", "steps"):
        if (value := getattr(flags, name.replace("-", "_"))) < 1:
            raise ValueError(f"--{name} {value}: expected a whole number >= 1")
    if flags.batch_size % flags.microbatches:
        raise ValueError(f"--microbatches {flags.microbatches}: --batch-size {flags.batch_size} does not divide by it")
    return flags


def run(flags: argparse.Namespace, comm, tell: Callable) -> tuple[dict, list[str]]:
    """All figures, and what is wrong with them. Collective."""
    import torch
    from sides import start_torch

    from hpctrain import Mesh

    num_cores = figures.pin(comm.rank)  # before gloo and autograd have threads
    model = f"GPT of {flags.blocks} blocks, width {flags.width}"
    tell(f"{model}, {flags.microbatches} micro-batches; {num_cores} cores; torch {torch.__version__}")
    with Mesh(comm, stages=2) as mesh:
        start_torch(mesh)
        result = measure(flags, mesh, tell)
        torch.distributed.destroy_process_group()
    tell(*summary(result["pairs"]), sep="\n")
    return result, faults(result) if flags.check or not result["pairs"] else []


if __name__ == "__main__":
    sys.exit(figures.main("pipeline.py", parse, run, sys.argv[1:]))
