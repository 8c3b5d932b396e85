"""A dry run of all stages of a pipeline: what it would take, where it would wait, and whether it would ever end.

Each stage does its actions in order; a receipt waits until its message is there. Sends do not block, unless asked for:
then a send waits for its receiver, and most grids of 1F1B stop for ever. Sums over ranks take no time here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpctrain.plan.program import program
from hpctrain.plan.schedule import COMPUTES, SCHEDULES, Action, Op, Place

SENDS = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}


class Deadlock(Exception):
    """No stage can go on; the message says what each of them waits for."""


class Times(NamedTuple):
    """Of one micro-batch on each stage, in any unit; `link` is the latency of a message.

    `backward` is the whole backward, of which `weights` is the share that a schedule which splits it puts off.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]
    link: float = 0.0

    @classmethod
    def alike(cls, num_stages: int, forward=1.0, backward=2.0, weights=1.0, link=0.0) -> "Times":
        return cls([forward] * num_stages, [backward] * num_stages, [weights] * num_stages, link)


class Span(NamedTuple):
    """One computation on one stage."""

    action: Action
    start: float
    end: float


@dataclass
class Timeline:
    """What happened: `spans[stage]` are its computations in order, `versions[stage][microbatch]` the number of updates
    that had been made there when its forward ran, `updates[stage][microbatch]` when its own was made."""

    spans: list[list[Span]] = field(default_factory=list)
    versions: list[dict[int, int]] = field(default_factory=list)
    updates: list[dict[int, int]] = field(default_factory=list)
    peak_in_flight: list[int] = field(default_factory=list)
    peak_until_weights: list[int] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        return max(span.end for spans in self.spans for span in spans)

    def busy(self, stage: int) -> float:
        return sum(span.end - span.start for span in self.spans[stage])

    @property
    def bubble_rate(self) -> float:
        """Idle share of all stages' time, as GPipe and Zero Bubble count it (Megatron divides by the busy time)."""
        total = self.makespan * len(self.spans)
        return 1 - sum(self.busy(stage) for stage in range(len(self.spans))) / total

    def picture(self, unit: float = 1.0) -> str:
        """A line a stage, a column a unit of time: `F0`, `B0`, dots where it waits."""
        width = 1 + max(len(str(span.action)) for spans in self.spans for span in spans)
        lines, digits = [], len(str(len(self.spans) - 1))
        for stage, spans in enumerate(self.spans):
            cells = ["." for _ in range(round(self.makespan / unit))]
            for span in spans:
                for cell in range(round(span.start / unit), round(span.end / unit)):
                    cells[cell] = str(span.action)
            lines.append(f"stage {stage:{digits}} |" + "".join(cell.rjust(width) for cell in cells))
        return "\n".join(line.rstrip() for line in lines)


def simulate(
    name: str,
    num_stages: int,
    num_microbatches: int,
    times: Times | None = None,
    *,
    num_updates: int = 1,
    num_chunks: int = 1,
    warmup: float = 1.0,
    blocking_sends: bool = False,
) -> Timeline:
    """Runs all stages of schedule `name` dry. Raises Deadlock, and ValueError as `program` does."""
    place = Place(0, num_stages, num_microbatches, num_updates, num_chunks, warmup)
    programs = [program(name, place._replace(stage=stage)) for stage in range(num_stages)]
    return run(programs, times or Times.alike(num_stages), SCHEDULES[name].splits_backward, num_chunks, blocking_sends)


def run(programs, times: Times, splits_backward: bool, num_chunks: int = 1, blocking_sends: bool = False) -> Timeline:
    """Runs any programs dry, one a stage."""
    stages = [_Stage(number, actions, times, splits_backward, num_chunks) for number, actions in enumerate(programs)]
    arrivals: dict[tuple, float] = {}  # when the message for (stage, action) is there
    while any(stage.next is not None for stage in stages):
        moved = [_advance(stage, stages, arrivals, times.link, blocking_sends) for stage in stages]
        if not any(moved):
            waiting = ", ".join(f"stage {stage.number} for {stage.next}" for stage in stages if stage.next is not None)
            raise Deadlock(f"nobody can go on: {waiting}")
    return Timeline(
        [stage.spans for stage in stages],
        [stage.versions for stage in stages],
        [stage.updates for stage in stages],
        [stage.peak for stage in stages],
        [stage.peak_until_weights for stage in stages],
    )


class _Stage:
    def __init__(self, number: int, actions: Sequence[Action], times: Times, splits_backward: bool, num_chunks: int):
        self.number, self.actions, self.place, self.clock = number, actions, 0, 0.0
        whole, weights = times.backward[number], times.weights[number]
        costs = {Op.F: times.forward[number], Op.B: whole - weights if splits_backward else whole, Op.W: weights}
        self.costs = {op: cost / num_chunks for op, cost in costs.items()}
        self.splits_backward = splits_backward
        self.spans: list[Span] = []
        self.num_updates, self.peak, self.peak_until_weights = 0, 0, 0
        self.versions: dict[int, int] = {}
        self.updates: dict[int, int] = {}
        self._in_flight: set[tuple] = set()
        self._until_weights: set[tuple] = set()
        self._unapplied: list[int] = []

    @property
    def next(self) -> Action | None:
        return self.actions[self.place] if self.place < len(self.actions) else None

    def compute(self, action: Action) -> None:
        end = self.clock + self.costs[action.op]
        self.spans.append(Span(action, self.clock, end))
        self.clock = end
        key = action[1:]
        if action.op is Op.F:
            self.versions.setdefault(action.microbatch, self.num_updates)
            self._in_flight.add(key)
            self._until_weights.add(key)
            self.peak = max(self.peak, len(self._in_flight))
            self.peak_until_weights = max(self.peak_until_weights, len(self._until_weights))
        if action.op is Op.B:
            self._in_flight.remove(key)
            self._unapplied.append(action.microbatch)
        if action.op is (Op.W if self.splits_backward else Op.B):
            self._until_weights.remove(key)

    def step(self) -> None:
        for microbatch in self._unapplied:
            self.updates[microbatch] = self.num_updates
        self._unapplied.clear()
        self.num_updates += 1


def _advance(stage: _Stage, stages: list[_Stage], arrivals: dict, link: float, blocking_sends: bool) -> bool:
    """Does as much of a stage's list as can be done; whether that was anything."""
    began = stage.place
    while (action := stage.next) is not None:
        if action.op in (Op.RECV_F, Op.RECV_B):
            key = (stage.number, *action)
            if key not in arrivals:
                break
            stage.clock = max(stage.clock, arrivals[key])
        elif action.op in SENDS:
            receiver, message = _addressed(action, stage.number, len(stages))
            if blocking_sends and stages[receiver].next != message and (receiver, *message) not in arrivals:
                break
            arrivals[(receiver, *message)] = stage.clock + link
        elif action.op in COMPUTES:
            stage.compute(action)
        elif action.op is Op.STEP:
            stage.step()
        stage.place += 1
    return stage.place > began


def _addressed(action: Action, stage: int, num_stages: int) -> tuple[int, Action]:
    """Who receives what is sent, and as which of its actions: the last stage's chunk goes on at the first stage."""
    op, step = SENDS[action.op]
    chunk, receiver = divmod(action.chunk * num_stages + stage + step, num_stages)
    return receiver, Action(op, action.microbatch, chunk)
