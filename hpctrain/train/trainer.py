"""The course of a run: step after step, what is noted of each, and what it comes to in the end."""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.plan.schedule import one_stage
from hpctrain.train.executor import Executor, StepResult

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


class Trainer:
    """Runs the executor from the state's step to the last one. `note(line)` is told of every step."""

    def __init__(self, config: Config, executor: Executor, mesh: Mesh, note):
        self.config, self.executor, self.mesh, self.note = config, executor, mesh, note
        self.state = TrainState()
        self._actions = list(one_stage(config.num_microbatches))

    def train(self) -> None:
        """Raises NotFinite, on all ranks alike, where --on-nan stop finds a reason to. Collective."""
        while self.state.step < self.config.steps:
            began = time.perf_counter()
            rows = len(self.executor.batches.sampler.rows(self.state.step))
            result = self.executor.run(self._actions, self.state.step)
            self._account(result, rows, time.perf_counter() - began)

    def figures(self) -> dict:
        """What the summary says of the course: losses, counts, speed (median step)."""
        state = self.state
        seconds = statistics.median(state.step_seconds) if state.step_seconds else None
        return {
            "steps": state.step,
            "first_loss": state.first_loss,
            "final_loss": state.final_loss,
            "skipped_steps": state.skipped_steps,
            "samples_per_second": state.rows / state.seconds if state.seconds else None,
            "step_seconds": seconds,
        }

    def _account(self, result: StepResult, rows: int, seconds: float) -> None:
        state = self.state
        state.step += 1
        state.rows += rows
        state.seconds += seconds
        state.step_seconds.append(seconds)
        state.skipped_steps += result.skipped is not None
        if result.loss is not None:
            state.final_loss = result.loss
            state.first_loss = result.loss if state.first_loss is None else state.first_loss
        self.note(
            {
                "step": state.step,
                "loss": result.loss,
                "items": result.items,
                "seconds": seconds,
                "rows_per_second": rows / seconds,
                "skipped": result.skipped,
            }
        )
