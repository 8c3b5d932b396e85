"""Data parallel training in a loop of the user's own: wrap the model, and gradients are global when backward() returns.

There is no word for "the backward is over" in torch, but its engine calls back whoever asks during it. Whatever
comes first asks: a hook on the outputs of the forward, or one on a parameter that is about to get a gradient. So a
rank whose loss happens to use no parameter still takes part, as long as its loss depends on an output.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpctrain.comm.allreduce import check_reduction
from hpctrain.comm.mesh import Mesh
from hpctrain.train.join import Attendance, as_call
from hpctrain.train.start import share_first
from hpctrain.train.statistics import RunningStatistics
from hpctrain.train.synchronise import GlobalGradients
from hpctrain.train.wrap import check_trainable, refuse_sparse, tensors_in, warn_of_mixed_rows


class DataParallel(nn.Module):
    """`module`, the same on all replicas of `mesh`, each of which computes rows of its own. Collective.

        model = DataParallel(Net(), mesh)                  # rank 0's parameters and buffers replace everybody's
        optimizer = torch.optim.AdamW(model.parameters())  # optimizer, clipping and scheduler stay plain torch
        loss_of(model(inputs)).backward()                  # parameter.grad is global when this returns
        optimizer.step()

    `reduction`: "mean" is the sum of the ranks' gradients by their number, so the gradient of the mean loss where all
    ranks have equally many rows; "sum" is the sum. Gradients travel in buckets of at least `bucket_bytes`, while the
    backward still runs. A parameter that no rank used has grad None.

    All ranks make the same synchronised backwards in the same order, else CollectiveMismatch on all; for unequal
    numbers of batches see `join`. A parameter to be unfrozen later must require a gradient when the model is wrapped.

    Raises ValueError for a model that cannot train this way, AgreedError on all ranks where they built different ones.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, reduction: str = "mean", bucket_bytes: int = 1 << 20):
        super().__init__()
        check_reduction(reduction)
        if bucket_bytes < 1:
            raise ValueError(f"DataParallel: bucket_bytes={bucket_bytes} is less than 1")
        check_trainable(module)
        _check_unwrapped(module)
        self.module, self.reduction = module, reduction
        self._group = mesh.data
        parameters = dict(module.named_parameters())
        trained = [f"{name} requires a gradient" for name, each in parameters.items() if each.requires_grad]
        settings = [f"reduction={reduction!r}", f"bucket_bytes={bucket_bytes}"]
        share_first({**parameters, **dict(module.named_buffers())}, mesh.data, trained + settings)
        self._gradients = GlobalGradients(parameters, mesh.data, reduction, bucket_bytes)
        for name, parameter in self._gradients.parameters.items():
            parameter.register_hook(_BeforeGradient(self, name))
        self._statistics = RunningStatistics({"": module}, mesh.data)
        if self._statistics.names and mesh.data.size > 1 and mesh.data.rank == 0:
            warn_of_mixed_rows(self._statistics.names)
        self._in_backward, self._moves, self._attendance = False, True, None

    def forward(self, *args, **kwargs):
        """What the module returns: a tensor, or tensors in tuples, lists, dictionaries or data classes."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:  # the last backward ended by an exception
            self._in_backward = False
            self._gradients.forget()
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in tensors_in(outputs):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(lambda gradient: self._begin())
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward inside adds up this rank's own gradients; the next one outside makes the whole sum global."""
        before, self._moves = self._moves, False
        try:
            yield
        finally:
            self._moves = before

    @contextmanager
    def join(self, *steps) -> Iterator[None]:
        """For loops of unequal length: a rank that is done early stands by until the last one is. Collective.

            with model.join(lambda: clip_grad_norm_(model.parameters(), 1.0), optimizer, scheduler):
                for inputs, targets in loader:
                    ...

        `steps` are what the loop does after each synchronised backward, in this order: objects with .step(), or
        functions. A rank that is done contributes zeros and calls them too, so that at the end all ranks hold the same
        weights and the same optimizer state; torch's join does not step the optimizer of a rank that is done. "mean"
        divides by the number of ranks that still have batches. One synchronised backward an update; the loop makes no
        other collective calls; what a rank added up under no_sync and did not synchronise is left out.
        """
        calls = [as_call(step) for step in steps]
        if self._attendance is not None:
            raise ValueError("join: already inside a join of this model")
        self._attendance = Attendance(self._group)
        try:
            yield
            while num_active := self._attendance.count(False):
                self._gradients.shadow(num_active)
                for call in calls:
                    call()
        finally:
            self._attendance = None

    def average_statistics(self) -> None:
        """Replaces the running statistics of batch normalisation by their mean over the ranks. Collective.

        Call it before an evaluation, and before weights are saved; without such layers it does nothing.
        """
        self._statistics.average(1.0)

    def _begin(self) -> None:
        """The first sign of a backward; later ones do nothing."""
        if self._in_backward:
            return
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._synchronises = self._moves
        if self._synchronises:
            attendance = self._attendance
            self._gradients.begin(attendance.count(True) if attendance else self._group.size)

    def _before_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            refuse_sparse(name)
        self._begin()
        self._gradients.before(name)

    def _end(self) -> None:
        self._in_backward = False
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and name not in self._gradients.parameters:
                raise ValueError(
                    f"DataParallel: {name} required no gradient when the model was wrapped; wrap, then freeze"
                )
        if self._synchronises:
            self._gradients.finish()


class _BeforeGradient:
    """Called with the gradient of one parameter, before it is added to `parameter.grad`."""

    def __init__(self, model: DataParallel, name: str):
        self.model, self.name = model, name

    def __call__(self, gradient: torch.Tensor) -> None:
        self.model._before_gradient(self.name, gradient)


def _check_unwrapped(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, DataParallel):
            raise ValueError(f"DataParallel: {name or 'the model'} is wrapped already; wrap a model once, as a whole")
    for name, parameter in module.named_parameters():
        if any(isinstance(hook, _BeforeGradient) for hook in (parameter._backward_hooks or {}).values()):
            raise ValueError(f"DataParallel: {name} is wrapped already; wrap a model once, and keep the wrapper")
