"""Updates of a stage on its own, without a flush: 1f1b-async steps after each micro-batch, 2bw after each batch.

Each micro-batch is computed with the version of the weights that the schedule names (plan/formulas.py), which the stash
keeps. Nobody waits for all stages: loss and items travel with the gradients from stage to stage.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from hpctrain.comm.abort import RankFailed
from hpctrain.comm.device_buffer import allocator
from hpctrain.model.stash import WeightStash
from hpctrain.plan.formulas import version_used
from hpctrain.plan.program import updates_after
from hpctrain.plan.schedule import SCHEDULES, Action, Place
from hpctrain.train.agreement import whole
from hpctrain.train.timing import REMEMBERED
from hpctrain.train.update import StepResult, Update


class LocalUpdate(Update):
    """As Update, of schedule `name` at `place`. Versions are counted from where the pipeline was last empty.

    What is not finite ends the job at once. `clip_norm` is for the gradient of a stage in 1f1b-async, of all in 2bw.
    """

    def __init__(self, *args, name: str, place: Place, vertical_sync: bool = False, **settings):
        super().__init__(*args, **settings)
        self._version = lambda microbatch: version_used(name, place, microbatch, vertical_sync)
        self._each, self._num_microbatches = updates_after(name, place), place.num_microbatches
        self.stash = WeightStash(self.gradients.parameters, allocator(self.stage.device), self.gradients.accumulate)
        self._sums = np.zeros(2 + len(self.gradients.parameters))  # loss, items, uses of each parameter
        self._exchange = self.mesh.data.ring.one_shot(self._sums, "loss and items")
        self.versions: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)  # of each update: used, and made before it
        self._agrees = not SCHEDULES[name].microbatch_updates

    def begin(self, step: int) -> None:
        super().begin(step)
        self._first_step = step
        self._figures: dict[int, tuple[float, float]] = {}
        self._step_loss = self._step_items = 0.0
        self.stash.restart()

    def weights(self, microbatch: int) -> Mapping[str, torch.Tensor]:
        return self.stash.weights(self._version(microbatch))

    def all_weights(self) -> Iterable[torch.Tensor]:
        return (*super().all_weights(), *self.stash.tensors())

    def addresses(self) -> set[int]:
        return super().addresses() | self.stash.addresses()

    @property
    def num_versions(self) -> int:
        return self.stash.peak

    def add_loss(self, microbatch: int, loss: torch.Tensor, items: float) -> None:
        if not torch.isfinite(loss):
            raise RankFailed(f"step {self._step_of(microbatch) + 1}: not finite: the loss on rank {self.mesh.rank}")
        self._figures[microbatch] = float(loss), items

    def note_detached(self, microbatch: int) -> None:
        if self._figures[microbatch][1]:
            step = self._step_of(microbatch) + 1
            raise RankFailed(f"step {step}: the loss depends on no parameter; is it detached?")

    def tell(self, microbatch: int) -> list[torch.Tensor]:
        return [torch.tensor(self._figures[microbatch], dtype=torch.float64)]

    def learn(self, microbatch: int, told: list[torch.Tensor]) -> None:
        self._figures[microbatch] = tuple(told[0].tolist())

    def _step_of(self, microbatch: int) -> int:
        return self._first_step + microbatch // self._num_microbatches

    def _start_reduction(self, number: int) -> None:
        name = self.gradients.not_finite(self.gradients.buckets[number])
        if name is not None:
            raise RankFailed(f"not finite: the gradient of {name} on rank {self.mesh.rank}")
        self.reduction.start(number)

    def _reduce(self, action: Action) -> None:
        """Sums over the replicas: gradients, loss and items, and which parameters were of use."""
        super()._reduce(action)
        first = action.microbatch * self._each
        own = [self._figures.pop(number, (0.0, 0.0)) for number in range(first, first + self._each)]
        self._sums[:2] = np.sum(own, axis=0)
        self._sums[2:] = list(self.gradients.touched.values())
        self.items_seen += self._sums[1]
        self._exchange.start()
        self._exchange.wait()

    def _agree(self, action: Action) -> None:
        """2bw clips by the norm over all stages, so here they wait for each other."""
        self._agreement.clear()
        if self.mesh.replica == 0:
            self._agreement.add_squared_norm(self.gradients.squared_norm(self.gradients.parameters))
        self._agreement.exchange()

    def _step(self, action: Action) -> None:
        update = action.microbatch
        loss, items = map(float, self._sums[:2])
        step = self._step_of(update * self._each)
        norm = self._change(step, items) if items else None
        done = (update + 1) * self._each
        self.versions.append((self._version(done - 1), update))
        self.stash.retire(self._version(done))
        self.stash.publish(update + 1)
        self.gradients.zero()
        self._step_loss += loss
        self._step_items += items
        if done % self._num_microbatches == 0:
            mean = self._step_loss / self._step_items if self._step_items else None
            self.result = StepResult(mean, whole(self._step_items), gradient_norm=norm)
            self._step_loss = self._step_items = 0.0
            self.step_number = step
            self.on_result(self.result)

    def _change(self, step: int, items: float) -> float | None:
        """Changes the weights; returns the norm before clipping, where it is that of the whole model."""
        self.gradients.scale(1.0 / items)
        touched = (name for name, uses in zip(self.gradients.parameters, self._sums[2:]) if uses)
        self.gradients.attach(set(touched))
        norm = None
        if self.clip_norm is not None and self._agrees:
            norm = self._agreement.norm / items
            self.gradients.shorten(self.clip_norm, norm)
        elif self.clip_norm is not None:
            self.gradients.clip(self.clip_norm)
        self.change(step)
        return norm
