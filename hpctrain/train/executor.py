"""Runs one rank's list of actions: the only training loop there is."""

import time
from collections.abc import Callable, Iterable

import torch

from hpctrain.model.gradients import FlatGradients
from hpctrain.model.stage import Stage
from hpctrain.plan.program import actions, updates_after
from hpctrain.plan.schedule import COMPUTES, SCHEDULES, Action, Op, Place
from hpctrain.train.batches import Batches
from hpctrain.train.passes import Passes
from hpctrain.train.stop_vote import StopVote
from hpctrain.train.straggle import Straggle
from hpctrain.train.timing import Timing
from hpctrain.train.update import StepResult, Update


class Executor:
    """What each Op means here: forward, backward and messages are `passes`, what follows from gradients is `update`.

    Runs schedule `name` at `place`. `watchers` are told of each action: (action, its step, began, ended), in seconds of
    time.perf_counter.
    """

    def __init__(self, passes: Passes, update: Update, name: str, place: Place):
        self.passes, self.update, self.name, self.place = passes, update, name, place
        self.straggle: Straggle | None = None
        self.vote: StopVote | None = None  # where steps end without all ranks
        self.was_stopped = False  # by the vote, in what was run last
        self.watchers: list[Callable[[Action, int, float, float], None]] = []
        self.timing = Timing()
        self._methods = {**passes.methods, **update.methods}
        self._each = updates_after(name, place)
        self._progress = update.mesh.progress
        self._is_timed = passes.stage.device.type == "cpu"  # a device is still at it when it has been told
        self._last_gradients = self._find_last_gradients()

    @property
    def stage(self) -> Stage:
        return self.passes.stage

    @property
    def batches(self) -> Batches:
        return self.passes.batches

    @property
    def gradients(self) -> FlatGradients:
        return self.update.gradients

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.update.optimizer

    def run_steps(self, first: int, num_steps: int) -> None:
        """As many steps from `first` on, fewer where a vote ends them; without a flush the pipeline empties after the
        last of them only.
        """
        self.was_stopped = False
        update, together = self.update, 1 if SCHEDULES[self.name].flushes else num_steps
        place = self.place._replace(num_updates=together)
        update.run(first, first + num_steps)
        for step in range(first, first + num_steps, together):
            self.run(actions(self.name, place, update.tied.adds_up, update.clip_norm is not None, update.served), step)
            if self.was_stopped:
                break
        if self.vote is not None:
            self.vote.finish()
        update.end()

    def run(self, actions: Iterable[Action], step: int) -> StepResult:
        """Runs `actions`, whose micro-batch 0 is the first of `step` (from 0); returns the result of the last step.

        Gradients begin to move as soon as the last micro-batch of an update has brought them.
        """
        self.passes.begin(step)
        self.update.begin(step)
        self.timing.begin()
        computed = 0.0  # seconds since the last update
        begun = 0  # steps
        for action in actions:
            number = self._steps_before(action)
            if number == begun and not self.was_stopped:
                begun += 1
                self._begin_step(step + number)
            elif number >= begun:  # of those that were to come behind the last one
                continue
            if self.straggle is not None and action.op in (Op.REDUCE, Op.PUSH):
                self.straggle.after(step + number, computed)
                computed = 0.0
            began = time.perf_counter()
            self._progress.begin((action, step + number))
            counts = action.op in COMPUTES and not self.passes.is_empty(action)
            self._arm(action)
            self._methods[action.op](action)
            ended = time.perf_counter()
            if counts:
                if self._is_timed:
                    self.timing.add(action.op, began, ended)
                computed += ended - began
            for watch in self.watchers:
                watch(action, step + number, began, ended)
            self._progress.poll()
        return self.update.result

    def _begin_step(self, step: int) -> None:
        if self.vote is None:
            return
        self._progress.begin("a vote whether to leave")
        if self.vote.begin_step():
            self.was_stopped = True
            self.update.stop_after(step)

    def _steps_before(self, action: Action) -> int:
        """Steps of this run that are before that of the action: none, where each ends with a flush."""
        once_an_update = action.op in (Op.REDUCE, Op.AGREE, Op.STEP, Op.PULL, Op.PUSH)
        each = self.place.num_microbatches // self._each if once_an_update else self.place.num_microbatches
        return (action.microbatch or 0) // each

    def _arm(self, action: Action) -> None:
        if action.op in (Op.B, Op.W) and (action.microbatch + 1) % self._each == 0:
            self.gradients.arm(self._last_gradients[action.op, action.chunk])

    def _find_last_gradients(self) -> dict[tuple[Op, int], list[str]]:
        """By operation and chunk: the parameters whose gradient it completes, if it is the last of an update."""
        put_off = self.passes.split.names if self.passes.split else frozenset()
        found: dict[tuple[Op, int], list[str]] = {}
        for chunk, part in enumerate(self.stage.parts):
            prefixes = tuple("" if self.stage.is_module else f"layers.{index}." for index in part)
            names = [name for name in self.gradients.parameters if name.startswith(prefixes)]
            found[Op.B, chunk] = [name for name in names if name not in put_off]
            found[Op.W, chunk] = [name for name in names if name in put_off]
        return found
