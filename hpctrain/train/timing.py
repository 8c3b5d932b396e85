"""What a rank's time goes into: how long its computations take, and how much of a run through the pipeline is idle."""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from hpctrain.comm.mesh import Mesh
from hpctrain.plan import formulas
from hpctrain.plan.schedule import COMPUTES, SCHEDULES, Op, Place
from hpctrain.plan.simulate import Times, simulate

REMEMBERED = 1000  # runs, and computations of each kind, that count in the figures
SIMULATED_UPDATES = 100  # at most, of a schedule without a flush


class Timing:
    """Records the computations of one rank. A run begins and ends with an empty pipeline."""

    def __init__(self):
        self.runs: deque[list[float]] = deque(maxlen=REMEMBERED)  # first start, last end, busy seconds
        self.seconds = {op: deque(maxlen=REMEMBERED) for op in COMPUTES}

    def begin(self) -> None:
        """A run begins."""
        self.runs.append([])

    def add(self, op: Op, began: float, ended: float) -> None:
        """One computation, in seconds of time.perf_counter."""
        self.seconds[op].append(ended - began)
        run = self.runs[-1]
        if run:
            run[1], run[2] = ended, run[2] + ended - began
        else:
            run[:] = began, ended, ended - began

    def medians(self) -> dict[str, float]:
        """Seconds of one micro-batch in one group of layers, by operation."""
        return {op.value: statistics.median(each) if each else 0.0 for op, each in self.seconds.items()}


def bubble_figures(timing: Timing, name: str, place: Place, offset: float, num_updates: int, mesh: Mesh) -> dict | None:
    """The bubble rate of schedule `name`, three times; None where there is one stage. Collective.

    `formula` is of stages that are alike, `simulated` of stages that take the seconds measured, `measured` what the
    clocks say: the idle share from the first computation of a run on any stage to the last one, the median over
    replicas and all runs but the first. `offset` brings this rank's clock to that of rank 0.
    """
    if place.num_stages == 1:
        return None
    runs = [[start + offset, end + offset, busy] for start, end, busy in filter(None, timing.runs)]
    told = mesh.world.all_gather_json([mesh.stage, mesh.replica, runs, timing.medians()])
    seconds = [medians for stage, replica, _, medians in sorted(told, key=lambda each: each[0]) if replica == 0]
    split = SCHEDULES[name].splits_backward
    times = stage_times(seconds, place.num_chunks, split)
    simulated = simulate(
        name,
        place.num_stages,
        place.num_microbatches,
        times,
        num_updates=min(num_updates, SIMULATED_UPDATES),
        num_chunks=place.num_chunks,
        warmup=place.warmup,
    )
    whole = [sum(each) / len(seconds) for each in (times.forward, times.backward, times.weights)]
    return {
        "formula": formulas.bubble_rate(name, place, *whole) if whole[1] else None,
        "simulated": simulated.bubble_rate if simulated.makespan else None,
        "measured": measured_bubble([each[:3] for each in told], mesh.grid.num_replicas),
    }


def stage_times(seconds: Sequence[dict[str, float]], num_chunks: int, split: bool) -> Times:
    """Of a micro-batch in all groups of layers of each stage, from the medians for one group."""
    forward, backward, weights = ([num_chunks * each[op] for each in seconds] for op in ("F", "B", "W"))
    if split:
        backward = [each + later for each, later in zip(backward, weights)]
    return Times(forward, backward, weights)


def measured_bubble(told: list[list[Any]], num_replicas: int) -> float | None:
    """From stage, replica and runs of each rank, the latter on one clock."""
    rates: list[float] = []
    for replica in range(num_replicas):
        stages = [runs for _, which, runs in told if which == replica]
        together = list(zip(*stages))
        for each in together[1:] if len(together) > 2 else together:
            whole = max(end for _, end, _ in each) - min(start for start, _, _ in each)
            rates.append(1 - sum(busy for _, _, busy in each) / (len(each) * whole) if whole else 0.0)
    return statistics.median(rates) if rates else None
