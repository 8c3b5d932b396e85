"""The forward and backward of micro-batches on one rank, and the messages before and after them."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.comm.abort import RankFailed
from hpctrain.model.boundary import Arrivals, pack, unpack
from hpctrain.model.meter import ActivationMeter
from hpctrain.model.recompute import Recomputed, WritesInPlace
from hpctrain.model.split import Deferred, SplitBackward
from hpctrain.model.stage import Stage
from hpctrain.model.structure import tensors_in, to_device
from hpctrain.plan.schedule import Action, Op
from hpctrain.train.batches import Batches, MicroBatch
from hpctrain.train.checked import checked_loss
from hpctrain.train.links import Links
from hpctrain.train.update import Update


@dataclass
class Flight:
    """A micro-batch in one group of layers, from its inputs to its last gradient."""

    step: int
    index: int  # within the replica's rows of the step
    number: int  # within the global batch
    batch: MicroBatch | None = None
    received: tuple[list[torch.Tensor], Any] | None = None  # what the stage before sent
    arrivals: Arrivals | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    note: Any = None
    loss: torch.Tensor | None = None
    again: Recomputed | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # of the outputs, by their place
    borrowed: list[tuple[Op, list[torch.Tensor]]] = field(default_factory=list)
    deferred: Deferred | None = None


class Passes:
    """One rank's part in every micro-batch. `loss(outputs, targets)` gives (sum over items, number of items).

    `update` says which weights a micro-batch is computed with, and takes losses and gradients.
    """

    def __init__(
        self,
        stage: Stage,
        batches: Batches,
        loss: Callable,
        links: Links,
        update: Update,
        recompute: bool = False,
        split: SplitBackward | None = None,
    ):
        self.stage, self.batches, self.loss, self.links, self.update = stage, batches, loss, links, update
        self.recompute, self.split = recompute, split
        self._num_measured = max(batches.num_microbatches, 4 * update.mesh.grid.num_stages)
        self.meter = ActivationMeter(update.all_weights)
        self._modules = list(dict.fromkeys(module for layer in stage.layers for module in layer.modules()))
        self._buffered = [module for module in self._modules if any(True for _ in module.buffers(recurse=False))]
        self.peak_in_flight = 0
        self._was_measured = split is not None  # what is saved twice over, for two backwards, is no measure
        self.methods = {
            Op.RECV_F: self._receive_inputs,
            Op.F: self._forward,
            Op.SEND_F: self._send_outputs,
            Op.RECV_B: self._receive_gradients,
            Op.B: self._backward,
            Op.SEND_B: self._send_gradients,
            Op.W: self._weights,
        }

    def begin(self, step: int) -> None:
        """What comes next is micro-batch 0 of `step`; nothing is in flight."""
        self._first_step, self._num_in_flight = step, 0
        self.meter.active, self._was_measured = not self._was_measured, True
        self._flights: dict[tuple[int, int], Flight] = {}

    def _flight(self, action: Action) -> Flight | None:
        """None where the micro-batch has no rows."""
        key = action[1:]
        if key not in self._flights:
            step, index = divmod(action.microbatch, self.batches.num_microbatches)
            number = self.batches.number(self._first_step + step, index)
            if number is None:
                return None
            self._flights[key] = Flight(self._first_step + step, index, number)
        return self._flights[key]

    def is_empty(self, action: Action) -> bool:
        """Whether its micro-batch has no rows: then no stage computes or sends anything of it."""
        return self._flight(action) is None

    def _receive_inputs(self, action: Action) -> None:
        if (flight := self._flight(action)) is not None:
            flight.received = self.links.take(Op.RECV_F, action.chunk)
            flight.borrowed.append((Op.RECV_F, flight.received[0]))

    def _forward(self, action: Action) -> None:
        if action.microbatch >= self._num_measured:
            self.meter.active = False
        flight = self._flight(action)
        if flight is None:
            return
        if self.stage.is_first(action.chunk) or self.stage.is_last(action.chunk):
            flight.batch = to_device(self.batches.microbatch(flight.step, flight.index), self.stage.device)
        if self.recompute:
            flight.again = Recomputed(lambda given: self._compute(flight, action, given), self._modules)
            inputs = self._inputs(flight, attached=False)
            self.meter.hold(action[1:], tensors_in(inputs))
            try:
                self._keep(flight, action, flight.again.first(inputs))
            except WritesInPlace:
                layer = f"layers.{self.stage.parts[action.chunk].start}"
                raise RankFailed(f"{layer} writes to its inputs in place; --recompute needs them again") from None
        else:
            self._keep(flight, action, self._compute(flight, action, self._inputs(flight)))
        self._num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._num_in_flight)

    def _inputs(self, flight: Flight, attached: bool = True) -> Any:
        """What goes into the first layer; `attached` to the graph whose end brings the gradients of what arrived."""
        if flight.received is None:
            return flight.batch.inputs
        tensors, note = flight.received
        if attached:
            flight.arrivals = Arrivals(tensors, note)
            tensors = flight.arrivals.tensors
        return unpack(tensors, note)

    def _compute(self, flight: Flight, action: Action, inputs: Any) -> Any:
        """Outputs of the last layer; behind the last layer of all, the sum of the loss and the number of items."""
        weights = self.update.weights(action.microbatch)
        split = self.split.forward() if self.split else nullcontext()
        with self.meter.saving(action[1:]), split:
            outputs = self.stage.forward(inputs, flight.step, flight.number, action.chunk, weights)
            if not self.stage.is_last(action.chunk):
                return outputs
            return checked_loss(self.loss(outputs, flight.batch.targets))

    def _keep(self, flight: Flight, action: Action, result: Any) -> None:
        if self.stage.is_last(action.chunk):
            flight.loss, items = result
            self.update.add_loss(action.microbatch, flight.loss.detach(), items)
            return
        try:
            flight.outputs, flight.note = pack(result, lambda tensor: self._wants(tensor, flight, action))
        except TypeError as error:
            layer = self.stage.parts[action.chunk].stop - 1
            raise RankFailed(f"layers.{layer}, the last of a stage, gives what cannot travel: {error}") from None

    def _wants(self, tensor: torch.Tensor, flight: Flight, action: Action) -> bool:
        """Whether the gradient of an output is of use here. Without a graph yet it is, where there may be one."""
        if not self.recompute:
            return tensor.requires_grad
        arrived = flight.received is not None and any(flight.received[1][1])
        return (tensor.is_floating_point() or tensor.is_complex()) and (arrived or self.stage.is_trained(action.chunk))

    def _send_outputs(self, action: Action) -> None:
        if (flight := self._flight(action)) is not None:
            outputs = copied_if_lent(flight.outputs, flight.borrowed, self._own_memory())
            self.links.put(Op.SEND_F, action.chunk, outputs, flight.note)
            if self.recompute:
                flight.outputs = []

    def _own_memory(self) -> set[int]:
        """Addresses of weights and buffers: what is sent of them must not change on its way."""
        buffers = (buffer for module in self._buffered for buffer in module.buffers(recurse=False))
        return self.update.addresses() | {buffer.untyped_storage().data_ptr() for buffer in buffers}

    def _receive_gradients(self, action: Action) -> None:
        if (flight := self._flight(action)) is not None:
            tensors, places = self.links.take(Op.RECV_B, action.chunk)
            flight.borrowed.append((Op.RECV_B, tensors))
            flight.gradients = dict(zip(places, tensors))
            self.update.learn(action.microbatch, tensors[len(places) :])

    def _backward(self, action: Action) -> None:
        flight = self._flight(action)
        if flight is None:
            return
        if self.recompute:
            self._compute_again(flight, action)
        if self.stage.is_last(action.chunk):
            if flight.loss.requires_grad:
                flight.loss.backward()
            else:
                self.update.note_detached(action.microbatch)
        else:
            wanted = [place for place in flight.gradients if flight.outputs[place].requires_grad]
            if wanted:
                outputs, gradients = zip(*((flight.outputs[place], flight.gradients[place]) for place in wanted))
                torch.autograd.backward(outputs, gradients)
        if self.recompute:
            flight.again.end()
        flight.loss, flight.outputs, flight.batch, flight.again = None, [], None, None
        self._num_in_flight -= 1
        if self.split:
            flight.deferred = self.split.take()
            self.meter.release(action[1:])
            self.meter.hold(action[1:], flight.deferred.tensors())
        elif self.stage.is_first(action.chunk):
            self._end(flight, action)

    def _compute_again(self, flight: Flight, action: Action) -> None:
        result = flight.again.again(self._inputs(flight))
        if self.stage.is_last(action.chunk):
            flight.loss = result[0]
        else:
            flight.outputs = pack(result, lambda tensor: tensor.requires_grad)[0]

    def _send_gradients(self, action: Action) -> None:
        if (flight := self._flight(action)) is not None:
            found = {place: each for place, each in enumerate(flight.arrivals.gradients) if each is not None}
            tensors = copied_if_lent(list(found.values()), flight.borrowed) + self.update.tell(action.microbatch)
            self.links.put(Op.SEND_B, action.chunk, tensors, list(found))
            if not self.split:
                self._end(flight, action)

    def _weights(self, action: Action) -> None:
        if (flight := self._flight(action)) is not None:
            flight.deferred.run(self.update.gradients.accumulate)
            self._end(flight, action)

    def _end(self, flight: Flight, action: Action) -> None:
        """Nothing of the micro-batch is needed here any more."""
        for op, tensors in flight.borrowed:
            self.links.release(op, action.chunk, tensors)
        del self._flights[action[1:]]
        self.meter.release(action[1:])


def copied_if_lent(
    tensors: list[torch.Tensor],
    borrowed: list[tuple[Op, list[torch.Tensor]]],
    addresses: Collection[int] = (),
) -> list[torch.Tensor]:
    """`tensors`, copied where they lie in memory that may be overwritten while they still travel.

    That is what was `borrowed`, and storages at `addresses`.
    """
    lent = {each.untyped_storage().data_ptr() for _, those in borrowed for each in those}.union(addresses)
    return [each.clone() if each.untyped_storage().data_ptr() in lent else each for each in tensors]
