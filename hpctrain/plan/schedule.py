"""A training step as data: a list of small actions that one executor runs.

A schedule is a generator of actions for one rank; nothing else knows the order of work. `F` is the forward and `B` the
backward of one micro-batch, `REDUCE` completes the sum of the gradients over the replicas, `AGREE` is the one small
exchange of a step (item count, loss, finiteness, touched parameters), `STEP` the optimizer's. An action prints as
`F3`, `REDUCE`.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Op(Enum):
    F = "F"
    B = "B"
    REDUCE = "REDUCE"
    AGREE = "AGREE"
    STEP = "STEP"


class Action(NamedTuple):
    """One thing to do; `microbatch` is None for what happens once a step."""

    op: Op
    microbatch: int | None = None

    def __str__(self):
        return self.op.value if self.microbatch is None else f"{self.op.value}{self.microbatch}"


def one_stage(num_microbatches: int) -> Iterator[Action]:
    """All layers on one rank: each micro-batch's backward follows its forward at once, so one is in flight.

    F0 B0 F1 B1 ... REDUCE AGREE STEP
    """
    for microbatch in range(num_microbatches):
        yield Action(Op.F, microbatch)
        yield Action(Op.B, microbatch)
    yield from (Action(Op.REDUCE), Action(Op.AGREE), Action(Op.STEP))
