"""A model on all ranks, trained by hpctrain's DataParallel and by torch's DistributedDataParallel in the same run.

    mpirun -n 2 python benchmarks/peers/data_parallel.py --model gpt
    mpirun -n 8 python benchmarks/peers/data_parallel.py --model mlp

Both have the same weights, rows, loss and optimizer; two steps of each show it before anything is measured. Each rank
is pinned to a core, with one torch thread. torch's gradients go over gloo, in buckets of 25 MB as it has them. `mlp` is
25 million parameters and few rows, so that the sums of gradients count; `gpt` computes more than it sums up. `alone` is
the same step without sums.
"""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING

import above  # noqa: F401
import figures
from pipeline import VOCABULARY, distance, seconds_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpctrain import Mesh


GOALS = {("gpt", 2): 0.95, ("mlp", 2): 1.4, ("mlp", 8): 2.0}  # how many times as long torch takes, by model and ranks
TOLERANCE = 1e-5  # of losses and weights, relative to the largest of a tensor
CONTEXT, WIDTHS, CLASSES = 128, (1024, 4096, 4096, 1024), 10
HEADER = f"{'pair':<6}{'hpctrain':>12}{'torch':>12}{'alone':>12}{'torch / hpctrain':>19}"


def build(model: str) -> nn.Module:
    """The same weights on all ranks."""
    import torch
    from torch import nn

    from hpctrain.tasks.gpt import layer_factories

    torch.manual_seed(0)
    if model == "gpt":
        return nn.Sequential(*[make() for make in layer_factories(4, 256, 4, CONTEXT, 0.0, VOCABULARY)])
    layers = [layer for sizes in zip(WIDTHS, WIDTHS[1:]) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTHS[-1], CLASSES), nn.Unflatten(1, (1, CLASSES)))


def make_batches(model: str, rows: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of this rank, for some steps."""
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    if model == "gpt":
        tokens = torch.randint(VOCABULARY, (4, rows, CONTEXT + 1), generator=generator)
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
    inputs = torch.randn(4, rows, WIDTHS[0], generator=generator)
    return list(zip(inputs, torch.randint(CLASSES, (4, rows, 1), generator=generator)))


class Side:
    """`module`, wrapped or alone, and its loop."""

    def __init__(self, module: nn.Module):
        from sides import mean_loss, sgd

        self.module, self.mean_loss, self.optimizer = module, mean_loss, sgd(module.parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.mean_loss(self.module(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def difference(ours: Side, torchs: Side, batches: list, mesh: Mesh) -> float:
    """The largest of losses and weights in two steps. Collective."""
    found = 0.0
    for inputs, targets in batches[:2]:
        found = max(found, abs(ours.step(inputs, targets) / torchs.step(inputs, targets) - 1))
    pairs = zip(ours.module.parameters(), torchs.module.parameters())
    found = max(found, *(distance(mine.detach(), theirs.detach()) for mine, theirs in pairs))
    return max(mesh.world.all_gather_json(found))


def line(number: int, pair: dict) -> str:
    seconds = "".join(f"{1e3 * pair[name]:>9.1f} ms" for name in ("hpctrain", "torch", "alone"))
    return f"{number:<6}{seconds}{pair['torch'] / pair['hpctrain']:>19.3f}"


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("data_parallel.py", __doc__.splitlines()[0], rank)
    parser.add_argument("--model", choices=("gpt", "mlp"), default="mlp", help="default: mlp")
    for name, default, what in (("rows", 16, "of a rank"), ("pairs", 7, ""), ("steps", 3, "of each side in a pair")):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what}; default: {default}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if num_ranks < 2:
        raise ValueError("one rank has nobody to sum with; start it by mpirun -n 2")
    for name in ("rows", "pairs", "steps"):
        if getattr(flags, name) < 1:
            raise ValueError(f"--{name} {getattr(flags, name)}: expected a whole number >= 1")
    return flags


def faults(result: dict, flags, num_ranks: int) -> list[str]:
    """A difference, and with --check what the goals ask for."""
    if result["difference"] > TOLERANCE:
        return [f"they differ by {result['difference']:.1e}"]
    goal = GOALS.get((flags.model, num_ranks)) if flags.check else None
    ratio = statistics.median(pair["torch"] / pair["hpctrain"] for pair in result["pairs"])
    return [f"torch takes {ratio:.3f} times as long, at least {goal} was asked for"] if goal and ratio < goal else []


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what is wrong with them. Collective."""
    from sides import start_torch
    from torch.distributed import destroy_process_group
    from torch.nn.parallel import DistributedDataParallel

    from hpctrain import DataParallel, Mesh

    num_cores = figures.pin(comm.rank)  # before gloo and autograd have threads
    with Mesh(comm) as mesh:
        start_torch(mesh)
        ours = Side(DataParallel(build(flags.model), mesh))
        torchs = Side(DistributedDataParallel(build(flags.model)))
        sides = {"hpctrain": ours, "torch": torchs, "alone": Side(build(flags.model))}
        batches = make_batches(flags.model, flags.rows, mesh.rank)
        size = sum(each.numel() for each in ours.module.parameters())
        tell(f"{flags.model} of {size} parameters, {flags.rows} rows a rank; {mesh.size} ranks, {num_cores} cores")
        result = {"difference": difference(ours, torchs, batches, mesh), "pairs": []}
        tell(f"after two steps they differ by {result['difference']:.0e}", HEADER, sep="\n", flush=True)
        sides["alone"].step(*batches[0])
        for number in range(flags.pairs if result["difference"] <= TOLERANCE else 0):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            result["pairs"].append({name: seconds_of(sides[name].step, batches, flags.steps, mesh) for name in order})
            tell(line(number + 1, result["pairs"][-1]), flush=True)
        destroy_process_group()
    if result["pairs"]:
        ratios = [pair["torch"] / pair["hpctrain"] for pair in result["pairs"]]
        tell(f"torch / hpctrain: {statistics.median(ratios):.3f}, with {figures.told(ratios, 3)}")
    return result, faults(result, flags, comm.size)


if __name__ == "__main__":
    sys.exit(figures.main("data_parallel.py", parse, run, sys.argv[1:]))
