"""Runs one rank's list of actions: the only training loop there is.

Gradients are those of the sum of item losses. Items are counted beside them, and one multiplication by 1 / items
happens at STEP: ragged batches, masks, schedules and layouts all give the gradient of the mean over the items of the
global batch.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.stage import Stage
from hpctrain.plan.schedule import Action, Op
from hpctrain.train.batches import Batches, MicroBatch
from hpctrain.train.errors import NotFinite

LOSS = "loss"


@dataclass
class StepResult:
    """What all ranks know after a step: `loss` is the mean over `items`, None when there were none."""

    loss: float | None
    items: int
    skipped: str | None = None


class Executor:
    """One stage on one replica. `loss(outputs, targets)` gives (sum over items, number of items)."""

    def __init__(
        self, stage: Stage, gradients: FlatGradients, optimizer, batches: Batches, loss, mesh: Mesh, on_nan="stop"
    ):
        self.stage, self.gradients, self.optimizer = stage, gradients, optimizer
        self.batches, self.loss, self.mesh, self.on_nan = batches, loss, mesh, on_nan
        self._names = list(gradients.parameters)
        ring = mesh.data.ring
        self.reductions = [ring.all_reduce(b.flat, f"gradients {i}") for i, b in enumerate(gradients.buckets)]
        self._reduction_seconds: list[list[float]] = [[] for _ in self.reductions]
        self.peak_in_flight = 0
        self._agreement = Agreement(self._names, mesh)
        gradients.on_ready, gradients.on_gradient = self._start_reduction, mesh.progress.poll
        self._methods = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.REDUCE: self._reduce,
            Op.AGREE: self._agree,
            Op.STEP: self._step,
        }

    def run(self, actions: Iterable[Action], step: int) -> StepResult:
        """One training step (numbered from 0)."""
        self.step_number = step
        self.gradients.zero()
        self._agreement.clear()
        self._in_flight: dict[int, torch.Tensor] = {}
        for action in actions:
            self._methods[action.op](action.microbatch)
        return self.result

    def reduction_figures(self) -> list[dict]:
        """For each bucket: bytes, median seconds from start to end (waiting for others included), bus bandwidth."""
        figures = []
        for bucket, seconds in zip(self.gradients.buckets, self._reduction_seconds):
            size, median = bucket.flat.nbytes, statistics.median(seconds or [0.0])
            share = 2 * (self.mesh.data.size - 1) / self.mesh.data.size
            bandwidth = share * size / median if median and share else None
            figures.append({"algorithm": "ring", "bytes": size, "seconds": median, "bus_bandwidth": bandwidth})
        return figures

    def _forward(self, index: int) -> None:
        batch: MicroBatch | None = self.batches.microbatch(self.step_number, index)
        if batch is None:
            return
        outputs = self.stage.forward(batch.inputs, self.step_number, batch.number)
        loss, items = self.loss(outputs, batch.targets)
        self._agreement.add_loss(float(loss.detach()), int(items))
        self._in_flight[index] = loss
        self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
        self.mesh.progress.poll()

    def _backward(self, index: int) -> None:
        if index == self.batches.num_microbatches - 1:
            self.gradients.arm()
        loss = self._in_flight.pop(index, None)
        if loss is not None and loss.requires_grad:
            loss.backward()

    def _start_reduction(self, number: int) -> None:
        """A bucket is complete: look at it while it is still this rank's own, then let it travel."""
        name = self.gradients.not_finite(self.gradients.buckets[number])
        if name is not None:
            self._agreement.report(name)
        self.reductions[number].start()

    def _reduce(self, _) -> None:
        self.gradients.flush()
        for reduction, seconds in zip(self.reductions, self._reduction_seconds):
            reduction.wait()
            seconds.append(reduction.seconds)

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
            return
        self.result = StepResult(agreed.loss / agreed.items if agreed.items else None, agreed.items)
        if agreed.items:
            self.gradients.scale(1.0 / agreed.items)
            self.gradients.attach(agreed.touched())
            self.optimizer.step()

    def _overflow(self) -> str | None:
        """Every share was finite; is their sum? All replicas hold the same bits, so all find the same."""
        names = (self.gradients.not_finite(bucket) for bucket in self.gradients.buckets)
        name = next((name for name in names if name is not None), None)
        return name and f"the sum of the gradients of {name} over all ranks is not finite"


class Agreement:
    """The one small exchange of a step: loss, items, what is not finite on which rank, which parameters anybody
    touched.

    It is one vector of float64, summed over the replicas: [loss, items, fault of each rank, uses of each parameter].
    A fault is 0, or 1 for the loss, or 2 + the number of a parameter.
    """

    def __init__(self, names: list[str], mesh: Mesh):
        self._names = names
        self._mesh = mesh
        self._num_ranks = mesh.data.size
        self._vector = np.zeros(2 + self._num_ranks + len(names))
        self._faults = self._vector[2 : 2 + self._num_ranks]
        self._uses = self._vector[2 + self._num_ranks :]
        self._exchange = mesh.data.ring.all_reduce(self._vector, "agree", control=True)

    def clear(self) -> None:
        self._vector[:] = 0

    def add_loss(self, loss: float, items: int) -> None:
        if np.isfinite(loss):
            self._vector[:2] += loss, items
        else:
            self.report(LOSS)

    def report(self, name: str) -> None:
        """This rank's loss, or the gradient of the parameter named, is not finite; the first report stands."""
        if not self._faults[self._mesh.data.rank]:
            self._faults[self._mesh.data.rank] = 1 if name == LOSS else 2 + self._names.index(name)

    def touch(self, names: Iterable[str]) -> None:
        used = set(names)
        self._uses[:] = [name in used for name in self._names]

    def exchange(self) -> None:
        self._exchange.start()
        self._exchange.wait()

    @property
    def loss(self) -> float:
        return float(self._vector[0])

    @property
    def items(self) -> int:
        return round(float(self._vector[1]))

    def touched(self) -> set[str]:
        """Parameters that got a gradient on any replica."""
        return {name for name, uses in zip(self._names, self._uses) if uses}

    def fault(self) -> str | None:
        """What is not finite, and on which rank; None when all is well."""
        ranks = self._mesh.grid.replicas_of(self._mesh.stage)
        parts = []
        for rank, fault in zip(ranks, self._faults):
            if fault:
                what = "the loss" if fault == 1 else f"the gradient of {self._names[int(fault) - 2]}"
                parts.append(f"{what} on rank {rank}")
        return f"not finite: {', '.join(parts)}" if parts else None
