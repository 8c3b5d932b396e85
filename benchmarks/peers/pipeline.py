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

import argparse
import json
import os
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import comb

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from hpctrain import Mesh, Pipeline
from hpctrain.tasks.gpt import layer_factories

VOCABULARY, LEARNING_RATE = 256, 0.1
RATIO, SHARE = 1.1, 0.85  # what --check asks for
TOLERANCE = 1e-5  # of losses, gradients and weights, relative to the largest of a tensor
CERTAINTY = 0.95  # of an interval, where there are pairs enough

HEADER = f"{'pair':<6}{'hpctrain':>12}{'torch':>12}{'alone':>12}{'ideal':>12}{'torch / hpctrain':>19}{'of the ideal':>14}"


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Ours:
    """hpctrain's pipeline over `factories`."""

    def __init__(self, factories: list, flags: argparse.Namespace, mesh: Mesh):
        first = len(factories) // 2
        split = f"{first},{len(factories) - first}"
        how = {"schedule": "1f1b", "num_microbatches": flags.microbatches, "stage_split": split}
        self.pipeline = Pipeline(factories, mean_loss, mesh, sgd, **how)
        self.layers = self.pipeline.executor.stage.parts[0]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        return self.pipeline.step(inputs, targets)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and gradients of this rank, by name."""
        named = self.pipeline.executor.stage.named_parameters()
        return self.pipeline.state_dict(), {name.removeprefix("layers."): each.grad for name, each in named.items()}


class Torchs:
    """torch's pipeline of the same layers on the same stages, from the same weights."""

    def __init__(self, factories: list, flags: argparse.Namespace, mesh: Mesh, ours: Ours):
        self.module = nn.Sequential(OrderedDict((str(index), factories[index]()) for index in ours.layers))
        self.module.load_state_dict(ours.tensors()[0])
        self.optimizer = sgd(self.module.parameters())
        stage = PipelineStage(self.module, mesh.stage, mesh.size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, flags.microbatches, mean_loss)
        self.is_first = mesh.stage == 0

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.is_first:
            self.schedule.step(inputs, return_outputs=False)
        else:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
        self.optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.module.state_dict(), {name: each.grad for name, each in self.module.named_parameters()}


class Alone:
    """The whole model in a plain loop over the same micro-batches."""

    def __init__(self, factories: list, flags: argparse.Namespace):
        self.module = nn.Sequential(*[factory() for factory in factories])
        self.optimizer, self.num_microbatches = sgd(self.module.parameters()), flags.microbatches

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        for pair in zip(inputs.chunk(self.num_microbatches), targets.chunk(self.num_microbatches)):
            (mean_loss(self.module(pair[0]), pair[1]) / self.num_microbatches).backward()
        self.optimizer.step()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def start_torch(mesh: Mesh) -> None:
    """torch.distributed over gloo, between the ranks of `mesh`. Collective."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    make = partial(dist.TCPStore, "127.0.0.1", world_size=mesh.size, wait_for_workers=False)
    store = make(0, is_master=True) if mesh.rank == 0 else None
    port = mesh.world.broadcast_json(store and store.port)
    dist.init_process_group("gloo", store=store or make(port), rank=mesh.rank, world_size=mesh.size)


def differences(ours: Ours, torchs: Torchs, batches: list, mesh: Mesh) -> dict[str, float]:
    """The largest of losses, gradients and weights in two steps from the same weights. Collective."""
    found = {"losses": 0.0, "gradients": 0.0, "weights": 0.0}
    for inputs, targets in batches[:2]:
        loss, other = ours.step(inputs, targets), torchs.step(inputs, targets)
        if other is not None:
            found["losses"] = max(found["losses"], abs(loss / other - 1))
        for what, mine, theirs in zip(("weights", "gradients"), ours.tensors(), torchs.tensors()):
            assert mine.keys() == theirs.keys(), (mine.keys(), theirs.keys())
            each = [float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in mine]
            found[what] = max(found[what], *each)
    told = mesh.world.all_gather_json(found)
    return {what: max(each[what] for each in told) for what in found}


def seconds_of(step: Callable | None, batches: list, num_steps: int, mesh: Mesh) -> float:
    """Of one step, by the rank that took longest; without `step` this rank only waits. Collective."""
    mesh.barrier()
    mesh.barrier()  # a short wait ends on time
    began = time.perf_counter()
    for number in range(num_steps if step else 0):
        step(*batches[number % len(batches)])
    return max(mesh.world.all_gather_json(time.perf_counter() - began)) / num_steps


def measure(flags: argparse.Namespace, mesh: Mesh, tell: Callable) -> dict:
    """Differences, then seconds of a step in each pair, by who made it. Collective."""
    factories = layer_factories(flags.blocks, flags.width, flags.heads, flags.context, 0.0, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (8, flags.batch_size, flags.context + 1), generator=torch.Generator())
    batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
    ours = Ours(factories, flags, mesh)
    torchs, alone = Torchs(factories, flags, mesh, ours), Alone(factories, flags) if mesh.rank == 0 else None
    found = differences(ours, torchs, batches, mesh)
    tell("equal after two steps, to " + ", ".join(f"{value:.0e} in {what}" for what, value in found.items()))
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


def with_ratios(pair: dict[str, float], num_microbatches: int) -> dict[str, float]:
    """The seconds of a pair, and what follows from them."""
    ideal = pair["alone"] / 2 * (num_microbatches + 1) / num_microbatches
    return {**pair, "ideal": ideal, "ratio": pair["torch"] / pair["hpctrain"], "share": ideal / pair["hpctrain"]}


def line(number: int, pair: dict[str, float]) -> str:
    seconds = "".join(f"{1000 * pair[name]:>9.1f} ms" for name in ("hpctrain", "torch", "alone", "ideal"))
    return f"{number:<6}{seconds}{pair['ratio']:>19.3f}{pair['share']:>14.1%}"


def interval(values: list[float]) -> tuple[float, float, float]:
    """Between which two of the values their true median lies, and with what probability, whatever they come from."""
    ordered, size = sorted(values), len(values)
    inside, cut = 1 - 2 / 2**size, 1
    while cut < size // 2 and (fewer := inside - 2 * comb(size, cut) / 2**size) >= CERTAINTY:
        inside, cut = fewer, cut + 1
    return ordered[cut - 1], ordered[-cut], inside


def summary(pairs: list[dict[str, float]]) -> list[str]:
    told = []
    for what, key in (("torch / hpctrain", "ratio"), ("hpctrain of the ideal", "share")):
        values = [pair[key] for pair in pairs]
        low, high, inside = interval(values)
        told.append(f"{what}: {statistics.median(values):.3f}, the median lies in {low:.3f} to {high:.3f} ({inside:.0%})")
    return told


def faults(result: dict) -> list[str]:
    """What --check finds."""
    medians = {key: statistics.median(pair[key] for pair in result["pairs"]) for key in ("ratio", "share")}
    found = [f"{what} differ by {value:.1e}" for what, value in result["differences"].items() if value > TOLERANCE]
    if medians["ratio"] < RATIO:
        found.append(f"torch takes {medians['ratio']:.3f} times as long, at least {RATIO} was asked for")
    if medians["share"] < SHARE:
        found.append(f"{medians['share']:.1%} of the ideal, at least {SHARE:.0%} was asked for")
    return found


class Flags(argparse.ArgumentParser):
    """Raises its errors, and lets rank 0 alone print help."""

    rank = 0

    def error(self, message: str) -> None:
        raise ValueError(message.removeprefix("argument "))

    def print_help(self, file=None) -> None:
        if self.rank == 0:
            super().print_help(file)


def parse(argv: list[str], num_ranks: int, rank: int = 0) -> argparse.Namespace:
    """ValueError, one line that names the flag, for what does not fit."""
    parser = Flags(prog="pipeline.py", description=__doc__.splitlines()[0])
    parser.rank = rank
    sizes = {"blocks": 4, "width": 256, "heads": 4, "context": 128, "batch-size": 32, "microbatches": 8}
    for name, default in {**sizes, "pairs": 7, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where the figures are not what they should be")
    flags = parser.parse_args(argv)
    if num_ranks != 2:
        raise ValueError(f"{num_ranks} ranks; start it by mpirun -n 2")
    for name in (*sizes, "pairs", "steps"):
        if (value := getattr(flags, name.replace("-", "_"))) < 1:
            raise ValueError(f"--{name} {value}: expected a whole number >= 1")
    if flags.batch_size % flags.microbatches:
        raise ValueError(f"--microbatches {flags.microbatches}: --batch-size {flags.batch_size} does not divide by it")
    return flags


def main(argv: list[str]) -> int:
    """All ranks return the same exit code. Collective."""
    with Mesh() as everybody:
        try:
            flags = parse(argv, everybody.size, everybody.rank)
        except ValueError as error:
            if everybody.rank == 0:
                print(f"pipeline.py: {error}", file=sys.stderr)
            return 2
    tell = print if everybody.rank == 0 else lambda *words, **how: None
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[everybody.rank % len(cores)]})
    torch.set_num_threads(1)
    tell(f"GPT of {flags.blocks} blocks, width {flags.width}, on 2 stages; {len(cores)} cores; torch {torch.__version__}")
    with Mesh(stages=2) as mesh:
        start_torch(mesh)
        result = measure(flags, mesh, tell)
        dist.destroy_process_group()
    tell("\n".join(summary(result["pairs"])))
    found = faults(result) if flags.check else []
    tell(*found, sep="\n", end="\n" if found else "")
    if flags.json and everybody.rank == 0:
        with open(flags.json, "w", encoding="utf-8") as file:
            json.dump({"flags": vars(flags), **result}, file, indent=1)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
