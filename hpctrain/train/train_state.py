"""What a run has come to, beside its weights and its optimizer: the part of a checkpoint that is not tensors."""

from collections import deque
from dataclasses import dataclass, field

REMEMBERED = 1000  # steps whose times count in the median


@dataclass
class TrainState:
    """The only mutable state of a run besides weights and optimizer."""

    step: int = 0
    rows: int = 0
    skipped_steps: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    seconds: float = 0.0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    evaluated_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None  # of the metric that --early-stop watches
    best_step: int | None = None
    evaluations_since_best: int = 0
    stopped_early: bool = False

    def forget_best(self) -> None:
        """What --early-stop has seen: it goes by another rule from here on."""
        self.best = self.best_step = None
        self.evaluations_since_best, self.stopped_early = 0, False
