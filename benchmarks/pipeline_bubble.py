"""How much of a pipeline stands still under each schedule: measured beside the simulation and the formula.

    mpirun -n 4 python benchmarks/pipeline_bubble.py

Each rank is a stage. Its computations sleep, so they take a known time and no core: what is measured is the schedule,
with all its messages and updates, and eight stages need no eight cores. Only the end of a sleep, a
fifth of a millisecond, is spent awake.

The bubble is simulated with the seconds that the computations took in this run, the length of a step with the seconds
that they were asked to take. So whatever the library adds to a step shows in its length.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import TYPE_CHECKING, NamedTuple

import figures

from hpctrain.comm.clock import clock_offsets
from hpctrain.comm.environment import cores_allowed
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.plan.simulate import Times, simulate

if TYPE_CHECKING:
    from hpctrain import Mesh, Pipeline

POINTS, SHARE = 0.05, 0.10  # what --check allows: of the bubble rate, of the length of a step

HEADER = (
    f"{'schedule':<17}{'stages':>7}{'micro-batches':>15}{'formula':>9}{'simulated':>11}{'measured':>10}"
    f"{'step, simulated':>18}{'measured':>13}{'in flight':>11}{'versions':>10}"
)


class Row(NamedTuple):
    """Of one schedule. Bubbles are shares, steps milliseconds; `in_flight` and `versions` are those of stage 0.

    `num_updates`: how many follow each other without a flush. `slow`: as --slow says, where a stage is.
    """

    schedule: str
    stages: int
    num_microbatches: int
    num_updates: int
    slow: str | None
    formula: float
    simulated: float
    measured: float
    simulated_ms: float
    measured_ms: float
    in_flight: int
    versions: int

    def line(self) -> str:
        name = self.schedule + (f" {self.slow}" if self.slow else "")
        rates = f"{100 * self.formula:>8.1f}%{100 * self.simulated:>10.1f}%{100 * self.measured:>9.1f}%"
        steps = f"{self.simulated_ms:>15.1f} ms{self.measured_ms:>10.1f} ms"
        layout, held = f"{self.stages:>7}{self.num_microbatches:>15}", f"{self.in_flight:>11}{self.versions:>10}"
        return f"{name:<17}{layout}{rates}{steps}{held}"

    def faults(self) -> list[str]:
        """What --check finds. The formula is of stages that are alike, and of updates without an end."""
        by_formula = SCHEDULES[self.schedule].flushes and not self.slow
        what, wanted = ("formula", self.formula) if by_formula else ("simulation", self.simulated)
        found = []
        if abs(self.measured - wanted) > POINTS:
            found.append(f"a bubble of {self.measured:.1%}, the {what} has {wanted:.1%}")
        if abs(self.measured_ms / self.simulated_ms - 1) > SHARE:
            found.append(f"a step of {self.measured_ms:.1f} ms, the simulation has {self.simulated_ms:.1f} ms")
        return [f"{self.schedule}{f' --slow {self.slow}' if self.slow else ''}: {each}" for each in found]


def times_of(flags: argparse.Namespace, num_stages: int, slow: str | None) -> Times:
    """Seconds that the computations of each stage are to take."""
    factors = [1.0] * num_stages
    if slow:
        stage, factor = slow.split(":")
        factors[int(stage)] = float(factor)
    told = (flags.forward, flags.backward, flags.weights)
    return Times(*([factor * each / 1000 for factor in factors] for each in told))


def build(name: str, times: Times, num_microbatches: int, mesh: Mesh) -> Pipeline:
    """A pipeline of layers that take these times."""
    import torch
    from timed import TimedLayer, TimedSplit

    from hpctrain import Pipeline

    schedule = SCHEDULES[name]
    num_chunks = 2 if schedule.has_chunks else 1
    kept = times.weights if schedule.splits_backward else [0.0] * mesh.size
    seconds = [(f / num_chunks, (b - w) / num_chunks) for f, b, w in zip(times.forward, times.backward, kept)]
    layers = [lambda each=each: TimedLayer(*each) for each in seconds * num_chunks]
    pipeline = Pipeline(
        layers,
        lambda outputs, targets: (outputs - targets).square().mean(),
        mesh,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        schedule=name,
        num_microbatches=num_microbatches,
        chunks=num_chunks,
    )
    if schedule.splits_backward:
        stage = pipeline.executor.stage
        pipeline.executor.passes.split = split = TimedSplit(stage.layers, stage.named_parameters())
        split.seconds = times.weights[mesh.stage]
    return pipeline


def measure(name: str, flags: argparse.Namespace, mesh: Mesh, slow: str | None = None) -> Row:
    """Some steps of a schedule; of one without a flush, several updates in each of them. Collective."""
    import torch
    from timed import WIDTH

    from hpctrain.train.timing import bubble_figures

    times, num_microbatches = times_of(flags, mesh.size, slow), flags.microbatches or 4 * mesh.size
    pipeline = build(name, times, num_microbatches, mesh)
    executor, rows = pipeline.executor, torch.ones(num_microbatches, WIDTH)
    updates = 1 if SCHEDULES[name].flushes else flags.updates
    pipeline.step(rows, rows)
    for _ in range(1, flags.steps):
        pipeline.run([(rows, rows)] * updates)
    offset = clock_offsets(mesh.world)[0]
    rates = bubble_figures(executor.timing, name, executor.place, offset, updates, mesh)
    runs = [[start + offset, end + offset] for start, end, _ in executor.timing.runs]
    told = mesh.world.all_gather_json([runs, executor.passes.peak_in_flight, executor.update.num_versions])
    pipeline.close()
    num_chunks = executor.place.num_chunks
    whole = simulate(name, mesh.size, num_microbatches, times, num_updates=updates, num_chunks=num_chunks).makespan
    lengths = (1000 * seconds / updates for seconds in (whole, makespan([each[0] for each in told])))
    return Row(name, mesh.size, num_microbatches, updates, slow, *rates.values(), *lengths, *told[0][1:])


def makespan(runs: list[list[list[float]]]) -> float:
    """Median seconds from the first computation on any stage to the last, of all runs but the first.

    `runs[stage]` are start and end of each run, on one clock.
    """
    together = list(zip(*runs))[1:]
    return statistics.median(max(end for _, end in each) - min(start for start, _ in each) for each in together)


def parse(argv: list[str], num_ranks: int, rank: int = 0) -> argparse.Namespace:
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("pipeline_bubble.py", __doc__.splitlines()[0], rank)
    add = parser.add_argument
    add("--forward", type=float, default=40, metavar="MS", help="of a micro-batch on a stage; default: 40")
    add("--backward", type=float, default=80, metavar="MS", help="the whole of it; default: 80")
    add("--weights", type=float, default=40, metavar="MS", help="the share of it that zb-h1 puts off; default: 40")
    add("--microbatches", type=int, metavar="M", help="of an update; default: 4 for each stage")
    add("--steps", type=int, default=3, metavar="N", help="of which the first does not count; default: 3")
    add("--updates", type=int, default=4, metavar="N", help="in a step of 1f1b-async and 2bw; default: 4")
    add("--slow", default="1:2", metavar="STAGE:FACTOR", help="a stage that takes longer, under 1f1b; default: 1:2")
    add("--json", metavar="FILE", help="write all figures there")
    add("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if num_ranks < 2:
        raise ValueError("one rank is no pipeline; start it by mpirun -n 4")
    if flags.updates < 1:
        raise ValueError(f"--updates {flags.updates}: 1 or more")
    if flags.steps < 3:
        raise ValueError(f"--steps {flags.steps}: 3 or more, since the first does not count")
    if flags.forward <= 0:
        raise ValueError(f"--forward {flags.forward:g}: expected milliseconds, more than 0")
    if not 0 < flags.weights < flags.backward:
        raise ValueError(f"--weights {flags.weights:g}: a share of --backward {flags.backward:g}, more than 0")
    if flags.microbatches is not None and (flags.microbatches < 1 or flags.microbatches % num_ranks):
        raise ValueError(f"--microbatches {flags.microbatches}: expected a multiple of the {num_ranks} stages")
    _check_slow(flags.slow, num_ranks)
    return flags


def _check_slow(slow: str, num_ranks: int) -> None:
    stage, _, factor = slow.partition(":")
    if not (stage.isdecimal() and int(stage) < num_ranks and factor.replace(".", "", 1).isdecimal()):
        raise ValueError(f"--slow {slow}: expected STAGE:FACTOR with a stage below {num_ranks}, such as 1:2")


def run(flags: argparse.Namespace, comm, tell) -> tuple[dict, list[str]]:
    """All schedules, then 1f1b with a slow stage; rank 0 prints each as it is done. Collective."""
    from hpctrain import Mesh

    rows: list[Row] = []
    with Mesh(comm, stages=comm.size) as mesh:
        tell(f"{mesh.size} ranks, {len(cores_allowed())} cores; F {flags.forward:g} ms, B {flags.backward:g} ms")
        tell(HEADER, flush=True)
        for name, slow in (*((name, None) for name in SCHEDULES), ("1f1b", flags.slow)):
            rows.append(measure(name, flags, mesh, slow))
            tell(rows[-1].line(), flush=True)
    faults = [fault for row in rows for fault in row.faults()] if flags.check else []
    return {"rows": [row._asdict() for row in rows]}, faults


if __name__ == "__main__":
    sys.exit(figures.main("pipeline_bubble.py", parse, run, sys.argv[1:]))
