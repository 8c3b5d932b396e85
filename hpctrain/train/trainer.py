"""The course of a run: step after step, evaluations between them, what is noted of each, and what it comes to."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config, early_stop_rule
from hpctrain.plan.learning_rate import learning_rate
from hpctrain.plan.program import NOTHING
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.train.errors import AgreedError
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.executor import Executor
from hpctrain.train.update import StepResult

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


class Trainer:
    """Runs the executor from the state's step to the last one. `note(line)` is told of every step and evaluation."""

    def __init__(
        self, config: Config, executor: Executor, mesh: Mesh, note: Callable, evaluation: Evaluation | None = None
    ):
        self.config, self.executor, self.mesh, self.note = config, executor, mesh, note
        self.evaluation = evaluation
        self.state = TrainState()
        self.longest_run = 1  # steps without an empty pipeline between them
        self.rate = partial(
            learning_rate,
            num_steps=config.steps,
            peak=config.lr,
            schedule=config.lr_schedule,
            warmup_steps=config.lr_warmup_steps,
            lowest=config.lr_min,
        )
        executor.update.rate, executor.update.on_result = self.rate, self._account

    def train(self) -> None:
        """Raises NotFinite, on all ranks alike, where --on-nan stop finds a reason to. Collective."""
        state = self.state
        while state.step < self.config.steps and not state.stopped_early:
            self._run_until(self._next_stop())
            if self._is_evaluated(state.step):
                began = time.perf_counter()
                metrics = self.evaluate()
                self.note({"step": state.step, "eval": metrics, "seconds": time.perf_counter() - began})
                self._watch(metrics)

    def evaluate(self) -> dict[str, float]:
        """Metrics over the held-out rows with the weights of this step. Collective."""
        update = self.executor.update
        if self.state.evaluated_step != self.state.step:
            with update.statistics.averaged(update.items_seen):
                self.state.metrics = self.evaluation.run(self.executor.stage, self.executor.passes.links)
            self.state.evaluated_step = self.state.step
        return self.state.metrics

    def figures(self) -> dict:
        """What the summary says of the course: losses, counts, speed (median step)."""
        state = self.state
        seconds = statistics.median(state.step_seconds) if state.step_seconds else None
        return {
            "steps": state.step,
            "stopped_early": state.stopped_early,
            "first_loss": state.first_loss,
            "final_loss": state.final_loss,
            "skipped_steps": state.skipped_steps,
            "samples_per_second": state.rows / state.seconds if state.seconds else None,
            "step_seconds": seconds,
        }

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.eval_every
        return every is not None and step % every == 0 and self.evaluation.num_rows > 0

    def _next_stop(self) -> int:
        """The step at whose end all ranks are: each one, or the next evaluation where nobody waits for all."""
        step, every = self.state.step, self.config.eval_every
        if SCHEDULES[self.executor.name].flushes and self.executor.update.served == NOTHING:
            return step + 1
        return min(self.config.steps, step + every - step % every if every else self.config.steps)

    def _run_until(self, stop: int) -> None:
        executor, step = self.executor, self.state.step
        self.longest_run = max(self.longest_run, stop - step)
        self._began, self._waited = time.perf_counter(), executor.batches.seconds
        executor.run_steps(step, stop - step)

    def _account(self, result: StepResult) -> None:
        """A step is done."""
        state, batches = self.state, self.executor.batches
        step, now, waited = state.step, time.perf_counter(), batches.seconds
        rows, seconds = batches.sampler.num_rows_of(step), now - self._began
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
                "lr": self.rate(step),
                "gradient_norm": result.gradient_norm,
                "seconds": seconds,
                "data_seconds": waited - self._waited,
                "rows_per_second": rows / seconds,
                "skipped": result.skipped,
            }
        )
        self._began, self._waited = now, waited

    def check(self) -> None:
        """AgreedError where --early-stop watches a metric that the task does not have: now, not after hours."""
        if self.config.early_stop is not None:
            metric, names = early_stop_rule(self.config.early_stop)[0], self._metric_names()
            if metric not in names:
                there_is = ", ".join(names) or "none, for want of held-out rows"
                raise AgreedError(f"--early-stop {self.config.early_stop}: no such metric; there is {there_is}")

    def _metric_names(self) -> list[str]:
        return self.evaluation.names(self.executor.stage, self.executor.passes.links)

    def _watch(self, metrics: dict[str, float]) -> None:
        """Stops early when the metric has not become better for long enough. All ranks have the same metrics."""
        if self.config.early_stop is None:
            return
        state = self.state
        metric, patience, direction = early_stop_rule(self.config.early_stop)
        value = metrics.get(metric)
        better = (
            value is not None
            and math.isfinite(value)
            and (state.best is None or (value < state.best if direction == "min" else value > state.best))
        )
        if better:
            state.best, state.best_step, state.evaluations_since_best = value, state.step, 0
        else:
            state.evaluations_since_best += 1
        state.stopped_early = state.evaluations_since_best >= patience
        if state.stopped_early:
            best = f"{state.best:.4f} at step {state.best_step}" if state.best is not None else "never there"
            self.note(
                {"step": state.step, "stopped_early": f"{metric} no better in {patience} evaluations, best {best}"}
            )
