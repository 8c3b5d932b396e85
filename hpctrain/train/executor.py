"""Runs one rank's list of actions: the only training loop there is.

Gradients are those of the sum of item losses. Items are counted beside them, and one multiplication by 1 / items
happens at STEP: ragged batches, masks, schedules and layouts all give the gradient of the mean over the items of the
global batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.stage import Stage
from hpctrain.plan.schedule import Action, Op
from hpctrain.train.agreement import Agreement
from hpctrain.train.batches import Batches, MicroBatch
from hpctrain.train.checked import checked_loss
from hpctrain.train.errors import AgreedError, NotFinite
from hpctrain.train.reduction import Reduction
from hpctrain.train.statistics import RunningStatistics


@dataclass
class StepResult:
    """What all ranks know after a step: `loss` is the mean over `items`, None when there were none.

    `gradient_norm` is that before clipping, None without clipping.
    """

    loss: float | None
    items: float
    skipped: str | None = None
    gradient_norm: float | None = None


class Executor:
    """One stage on one replica. `loss(outputs, targets)` gives (sum over items, number of items)."""

    def __init__(
        self,
        stage: Stage,
        gradients: FlatGradients,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        loss: Callable,
        mesh: Mesh,
        on_nan: str = "stop",
        clip_norm: float | None = None,
    ):
        self.stage, self.gradients, self.optimizer = stage, gradients, optimizer
        self.batches, self.loss, self.mesh = batches, loss, mesh
        self.on_nan, self.clip_norm = on_nan, clip_norm
        self.reduction = Reduction(gradients, mesh.data.ring)
        self.statistics = RunningStatistics(stage.named_layers(), mesh.data)
        self.items_seen = 0  # by this replica, which its running statistics weigh by
        self.peak_in_flight = 0
        self._agreement = Agreement(list(gradients.parameters), mesh)
        gradients.on_ready, gradients.on_gradient = self._start_reduction, mesh.progress.poll
        self._methods = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.REDUCE: self._reduce,
            Op.AGREE: self._agree,
            Op.STEP: self._step,
        }

    def set_learning_rate(self, rate: float) -> None:
        """Of the steps from here on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def run(self, actions: Sequence[Action], step: int) -> StepResult:
        """One training step (numbered from 0). Gradients begin to move during the last B."""
        self.step_number = step
        if self.on_nan == "skip":
            self.statistics.remember()
        self.gradients.zero()
        self._agreement.clear()
        self._items = 0  # of this replica in this step
        self._in_flight: dict[int, torch.Tensor] = {}
        last_backward = max(place for place, action in enumerate(actions) if action.op is Op.B)
        for place, action in enumerate(actions):
            if place == last_backward:
                self.gradients.arm()
            self._methods[action.op](action.microbatch)
        return self.result

    def _forward(self, index: int) -> None:
        batch: MicroBatch | None = self.batches.microbatch(self.step_number, index)
        if batch is None:
            return
        outputs = self.stage.forward(batch.inputs, self.step_number, batch.number)
        loss, items = checked_loss(self.loss(outputs, batch.targets))
        self._agreement.add_loss(float(loss.detach()), items)
        self._items += items
        self._in_flight[index] = loss
        self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
        self.mesh.progress.poll()

    def _backward(self, index: int) -> None:
        loss = self._in_flight.pop(index, None)
        if loss is not None and loss.requires_grad:
            loss.backward()

    def _start_reduction(self, number: int) -> None:
        """A bucket is complete: look at it while it is still this rank's own, then let it travel."""
        name = self.gradients.not_finite(self.gradients.buckets[number])
        if name is not None:
            self._agreement.report(name)
        self.reduction.start(number)

    def _reduce(self, _) -> None:
        self.gradients.flush()
        self.reduction.wait()

    def _agree(self, _) -> None:
        self._agreement.touch(name for name, touched in self.gradients.touched.items() if touched)
        self._agreement.exchange()

    def _step(self, _) -> None:
        agreed = self._agreement
        fault = agreed.fault() or self._overflow()
        if fault is not None:
            self.result = StepResult(None, agreed.items, f"step {self.step_number + 1}: {fault}")
            if self.on_nan == "stop":
                raise NotFinite(self.result.skipped)
            self.statistics.restore()
            return
        self.items_seen += self._items
        self.result = StepResult(agreed.loss / agreed.items if agreed.items else None, agreed.items)
        if agreed.items:
            touched = agreed.touched()
            if not touched:
                raise AgreedError(f"step {self.step_number + 1}: the loss depends on no parameter; is it detached?")
            self.gradients.scale(1.0 / agreed.items)
            self.gradients.attach(touched)
            if self.clip_norm is not None:
                self.result.gradient_norm = self.gradients.clip(self.clip_norm)
            self.optimizer.step()

    def _overflow(self) -> str | None:
        """Every share was finite; is their sum? All replicas hold the same bits, so all find the same."""
        names = (self.gradients.not_finite(bucket) for bucket in self.gradients.buckets)
        name = next((name for name in names if name is not None), None)
        return name and f"the sum of the gradients of {name} over all ranks is not finite"
