"""The course of a run: step after step, evaluations between them, what is noted of each, and what it comes to."""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config, early_stop_rule
from hpctrain.plan.learning_rate import learning_rate
from hpctrain.plan.program import NOTHING
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.train.checkpoint import Checkpoints
from hpctrain.train.errors import AgreedError, Interrupted
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.executor import Executor
from hpctrain.train.train_state import TrainState
from hpctrain.train.update import StepResult


class Trainer:
    """Runs the executor from the state's step to the last one. `note(line)` is told of every step and evaluation.

    `checkpoints` has what --checkpoint-every asks for, and what is saved when a signal asks all ranks to leave.
    """

    def __init__(
        self, config: Config, executor: Executor, mesh: Mesh, note: Callable, evaluation: Evaluation | None = None
    ):
        self.config, self.executor, self.mesh, self.note = config, executor, mesh, note
        self.evaluation = evaluation
        self.checkpoints: Checkpoints | None = None
        self.state = TrainState()
        self.resumed_from: int | None = None  # the step, of a run that went on
        self.lost_ranks: list[int] = []  # of the launch, without which it went on
        self.last_line: dict | None = None  # noted of a step
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
        """Raises NotFinite, on all ranks alike, where --on-nan stop finds a reason to; Interrupted where a signal asked
        to leave and all is saved, another AgreedError where it cannot be. Collective.
        """
        try:
            self._train()
        except AgreedError:
            self._finish_saving()
            raise
        self._finish_saving()

    def _finish_saving(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def let_go(self) -> None:
        """Nothing is under way any more, where another rank was lost: neither saved nor read ahead."""
        self.executor.batches.close()
        if self.checkpoints is not None:
            self.checkpoints.give_up()

    def forget(self) -> None:
        """Frees what another trainer has taken over. Gradients stay, messages may still be on their way to them."""
        if self.executor.optimizer is not None:
            self.executor.optimizer.state.clear()
        for parameter in self.executor.stage.named_parameters().values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _train(self) -> None:
        if self.lost_ranks and self.state.step:
            self._catch_up()
        while not self.is_done:
            self._run_until(self._next_stop())
            self._look()
            self._save()

    def _catch_up(self) -> None:
        """With what follows the last step, where the loss of a rank came between."""
        if self.state.evaluated_step != self.state.step:
            self._look()
        if self._is_saved(self.state.step) and not self.checkpoints.has(self.state.step):
            self.checkpoints.save_or_tell(self.state)

    def _look(self) -> None:
        """Evaluates, where it is time to."""
        if self._is_evaluated(self.state.step):
            began, step = time.perf_counter(), self.state.step
            metrics = self.evaluate()
            self.note({"step": step, "eval": metrics, "seconds": time.perf_counter() - began})
            self._watch(metrics)

    @property
    def is_done(self) -> bool:
        return self.state.step >= self.config.steps or self.state.stopped_early

    def _save(self) -> None:
        """Where it is time to, or where this is the end: the last step, or that after which a signal is obeyed."""
        if self.checkpoints is None:
            return
        if self._is_asked_to_stop() and not self.is_done:
            folder = self.checkpoints.save(self.state)
            run = folder.parent.parent
            raise Interrupted(f"asked to stop: saved in {folder}; --resume auto --run-dir {run} goes on")
        if self._is_saved(self.state.step):
            self.checkpoints.save_or_tell(self.state)

    def _is_asked_to_stop(self) -> bool:
        """Whether any rank was. Collective."""
        executor = self.executor
        if self.flushes:
            return executor.update.result.stop
        return executor.was_stopped or any(self.mesh.world.all_gather_json(executor.update.is_asked_to_stop()))

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
            "resumed_from": self.resumed_from,
            "lost_ranks": self.lost_ranks,
            "stopped_early": state.stopped_early,
            "first_loss": state.first_loss,
            "final_loss": state.final_loss,
            "skipped_steps": state.skipped_steps,
            "samples_per_second": state.rows / state.seconds if state.seconds else None,
            "step_seconds": seconds,
        }

    def _is_saved(self, step: int) -> bool:
        every = self.config.checkpoint_every
        return every is not None and (self.is_done or step % every == 0)

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.eval_every
        return every is not None and step % every == 0 and self.evaluation.num_rows > 0

    def _next_stop(self) -> int:
        """The step at whose end all ranks are: each one, or where nobody waits for all the next evaluation or save."""
        step = self.state.step
        if self.flushes:
            return step + 1
        periods = filter(None, (self.config.eval_every, self.config.checkpoint_every))
        return min([self.config.steps, *(step + every - step % every for every in periods)])

    @property
    def flushes(self) -> bool:
        """Whether all ranks meet after each step, and agree."""
        return SCHEDULES[self.executor.name].flushes and self.executor.update.served == NOTHING

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
        self.last_line = {
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
        self.note(self.last_line)
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
