"""Schedules of a pipeline as data: in which order each stage computes.

A schedule is a generator of a stage's computations, and nothing else knows the order of work: `F` is the forward of one
micro-batch, `B` its backward (where a schedule splits it: the gradient of the inputs), `W` the gradient of the weights.
`program.py` adds messages and updates; one executor runs the result; `simulate.py` runs it dry. An action prints as
`F3`, with several chunks of layers on a stage as `F3.1`.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple


class Op(Enum):
    PULL = "PULL"
    RECV_F = "RECV_F"
    F = "F"
    SEND_F = "SEND_F"
    RECV_B = "RECV_B"
    B = "B"
    W = "W"
    SEND_B = "SEND_B"
    TIE = "TIE"
    REDUCE = "REDUCE"
    AGREE = "AGREE"
    STEP = "STEP"
    PUSH = "PUSH"


COMPUTES = (Op.F, Op.B, Op.W)


class Action(NamedTuple):
    """One thing to do. `chunk` counts the stage's own groups of layers.

    What happens once an update (REDUCE, TIE, AGREE, STEP, PULL, PUSH) has None as `microbatch`; without a flush, where
    updates follow each other, the number of the update.
    """

    op: Op
    microbatch: int | None = None
    chunk: int = 0

    def __str__(self):
        number = "" if self.microbatch is None else str(self.microbatch)
        return f"{self.op.value}{number}" + (f".{self.chunk}" if self.chunk else "")


class Place(NamedTuple):
    """A stage's place in a pipeline, and what is to be computed there.

    `num_microbatches` of an update, `num_updates` without a flush between them (1 in a synchronous schedule),
    `num_chunks` of layers on each stage, `warmup` as a multiple of the textbook's num_stages - 1 - stage forwards.
    """

    stage: int = 0
    num_stages: int = 1
    num_microbatches: int = 1
    num_updates: int = 1
    num_chunks: int = 1
    warmup: float = 1.0

    @property
    def stages_behind(self) -> int:
        return self.num_stages - 1 - self.stage


def naive(place: Place) -> Iterator[Action]:
    """One micro-batch at a time through the whole pipeline: one stage computes, all others wait.

    F0 B0 F1 B1 ...
    """
    for microbatch in range(place.num_microbatches):
        yield Action(Op.F, microbatch)
        yield Action(Op.B, microbatch)


def f_then_b(place: Place) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019): all micro-batches are in flight.

    F0 F1 F2 ... B0 B1 B2 ...
    """
    for op in (Op.F, Op.B):
        for microbatch in range(place.num_microbatches):
            yield Action(op, microbatch)


def one_f_one_b(place: Place) -> Iterator[Action]:
    """A warm-up of as many forwards as there are stages behind, then a backward for each forward.

    Stage r has at most p - r micro-batches in flight, however many there are (Narayanan et al., PipeDream, SOSP 2019,
    with a flush: PipeDream-Flush). A longer warm-up hides the latency of links, for more in flight.
    """
    total = place.num_microbatches * place.num_updates
    ahead = min(total, round(place.warmup * place.stages_behind))
    return _one_for_one(Action, total, ahead)


def interleaved(place: Place) -> Iterator[Action]:
    """1F1B over num_chunks groups of layers a stage (Narayanan et al., Megatron-LM, SC 2021): a bubble v times smaller.

    The micro-batches go round in groups of num_stages: through chunk 0 of all stages, then through chunk 1 of all.
    """
    stages, chunks = place.num_stages, place.num_chunks
    total = place.num_microbatches * chunks
    ahead = min(total, 2 * place.stages_behind + (chunks - 1) * stages)

    def action(op: Op, number: int) -> Action:
        group, within = divmod(number, stages * chunks)
        chunk, place_in_group = divmod(within, stages)
        return Action(op, group * stages + place_in_group, chunk if op is Op.F else chunks - 1 - chunk)

    return _one_for_one(action, total, ahead)


def _one_for_one(action: Callable[[Op, int], Action], total: int, ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then a backward for each forward, until all `total` are done."""
    yield from (action(Op.F, number) for number in range(ahead))
    for number in range(total):
        if number + ahead < total:
            yield action(Op.F, number + ahead)
        yield action(Op.B, number)


def zb_h1(place: Place) -> Iterator[Action]:
    """1F1B whose backward is split (Qi et al., Zero Bubble, ICLR 2024): only B is waited for, W fills the gaps.

    Stage r puts each W off by r micro-batches, so that every stage holds at most num_stages of them.
    """
    total, put_off = place.num_microbatches, place.stage
    for action in one_f_one_b(place):
        yield action
        if action.op is Op.B and action.microbatch >= put_off:
            yield Action(Op.W, action.microbatch - put_off)
    yield from (Action(Op.W, microbatch) for microbatch in range(max(0, total - put_off), total))


class Schedule(NamedTuple):
    """A generator, and what else must be known of it.

    `splits_backward`: whether it has W; `has_chunks`: whether a stage has several groups of layers, and micro-batches
    must divide by the stages; `flushes`: whether an update waits for all; `microbatch_updates`: whether each
    micro-batch is an update of its own.
    """

    generate: Callable[[Place], Iterator[Action]]
    summary: str
    splits_backward: bool = False
    has_chunks: bool = False
    flushes: bool = True
    microbatch_updates: bool = False


SCHEDULES = {
    "naive": Schedule(naive, "one micro-batch at a time"),
    "f-then-b": Schedule(f_then_b, "all forwards, then all backwards"),
    "1f1b": Schedule(one_f_one_b, "a backward after each forward, with a flush at the end"),
    "1f1b-interleaved": Schedule(interleaved, "1f1b over several chunks of layers a stage", has_chunks=True),
    "zb-h1": Schedule(zb_h1, "1f1b, weight gradients in the gaps", splits_backward=True),
    "1f1b-async": Schedule(one_f_one_b, "each micro-batch an update, no flush", flushes=False, microbatch_updates=True),
    "2bw": Schedule(one_f_one_b, "updates without a flush, two weight versions", flushes=False),
}
