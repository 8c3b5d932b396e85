"""Data parallel training in a loop of the user's own: wrap the model, and gradients are global when backward() returns.

There is no word for "the backward is over" in torch, but its engine calls back whoever asks during it. Whatever
comes first asks: a hook on the outputs of the forward, or one on a parameter that is about to get a gradient. So a
rank whose loss happens to use no parameter still takes part, as long as its loss depends on an output. What is over
without any gradient added up was no backward: torch.autograd.grad asks nothing of the other ranks.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from hpctrain.comm.allreduce import check_algorithm, check_reduction
from hpctrain.comm.mesh import Mesh
from hpctrain.model.compressors import Compressor
from hpctrain.model.structure import tensors_in
from hpctrain.train.feedback import check_compressor, describe
from hpctrain.train.graph import accumulator, leaf_below, will_add
from hpctrain.train.join import Attendance, as_call
from hpctrain.train.start import share_first
from hpctrain.train.statistics import RunningStatistics
from hpctrain.train.synchronise import GlobalGradients
from hpctrain.train.wrap import check_compressible, check_trainable, check_unchanged, refuse_sparse, warn_of_mixed_rows


class DataParallel(nn.Module):
    """`module`, the same on all replicas of `mesh`, each of which computes rows of its own. Collective.

        model = DataParallel(Net(), mesh)                  # rank 0's parameters and buffers replace everybody's
        optimizer = torch.optim.AdamW(model.parameters())  # optimizer, clipping and scheduler stay plain torch
        loss_of(model(inputs)).backward()                  # parameter.grad is global when this returns
        optimizer.step()

    `reduction`: "mean" is the sum of the ranks' gradients by their number, so the gradient of the mean loss where all
    ranks have equally many rows; "sum" is the sum. Gradients travel in buckets of at least `bucket_bytes`, while the
    backward still runs, by `algorithm` as in AllReduce; `compress` is "none", "bf16" as there, or "topk:0.01",
    "powersgd:4" or a Compressor (hpctrain/model/compressors.py), with which each rank keeps what it did not send for
    the next backward. A parameter that no rank used has grad None. Gradients are views of one arena, which the next
    backward writes again: what you keep beyond zero_grad(), clone.
    torch.autograd.grad gives this rank's own gradients, and an optimizer that steps inside the backward (in hooks on
    parameters) sees local ones. `bucket_bytes` None: as the mesh's `tuning` has it, else 1 MiB.

    All ranks make the same synchronised backwards in the same order, else CollectiveMismatch on all; for unequal
    numbers of batches see `join`. Models may share a backward. A parameter to be unfrozen later must require a gradient
    when the model is wrapped, and a model that is changed or converted must be wrapped after that.

    Raises ValueError for a model that cannot train this way, AgreedError on all ranks where they built different ones.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        reduction: str = "mean",
        bucket_bytes: int | None = None,
        algorithm: str = "auto",
        compress: str | Compressor = "none",
    ):
        super().__init__()
        check_reduction(reduction)
        check_algorithm(algorithm, mesh.data.ring)
        bucket_bytes = (mesh.tuning.bucket_bytes or 1 << 20) if bucket_bytes is None else bucket_bytes
        check_compressor(compress, algorithm)
        if bucket_bytes < 1:
            raise ValueError(f"DataParallel: bucket_bytes={bucket_bytes} is less than 1")
        check_trainable(module)
        if compress != "none":
            flag = f"DataParallel: compress={describe(compress)!r}"
            check_compressible(dict(module.named_parameters()), flag, compress)
        _check_unwrapped(module)
        self.module, self.reduction = module, reduction
        self._mesh, self._group = mesh, mesh.data
        self._wrapped = parameters = dict(module.named_parameters())
        trained = [f"{name} requires a gradient" for name, each in parameters.items() if each.requires_grad]
        settings = [f"reduction={reduction!r}", f"bucket_bytes={bucket_bytes}", f"algorithm={algorithm!r}"]
        settings.append(f"compress={describe(compress)!r}")
        share_first({**parameters, **dict(module.named_buffers())}, mesh.data, trained + settings)
        self._gradients = GlobalGradients(parameters, mesh, reduction, bucket_bytes, algorithm, compress)
        self._accumulators = {name: accumulator(each) for name, each in self._gradients.parameters.items()}
        self._nodes = frozenset(self._accumulators.values())
        for name, parameter in self._gradients.parameters.items():
            parameter.register_hook(_BeforeGradient(self, name))
        self._statistics = RunningStatistics({"": module}, mesh.data)
        if self._statistics.names and mesh.data.size > 1 and mesh.data.rank == 0:
            warn_of_mixed_rows(self._statistics.names)
        self._rows_seen = 0  # in training, which running statistics weigh by
        self._backward = None  # refers to what lives as long as the graph of the backward under way
        self._moves, self._attendance = True, None

    def forward(self, *args, **kwargs):
        """What the module returns: a tensor, or tensors in tuples, lists, dictionaries or data classes."""
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            if self.module.training and self._statistics.names:
                first = next(tensors_in((args, kwargs)), None)
                self._rows_seen += len(first) if first is not None and first.dim() else 1
            for tensor in tensors_in(outputs):
                if tensor.requires_grad and not tensor.is_leaf:
                    leaf = leaf_below(tensor, self._nodes)
                    tensor.register_hook(lambda gradient, leaf=leaf: self._begin_if_ours(leaf))
        return outputs

    def __reduce_ex__(self, protocol):
        raise ValueError("DataParallel: a wrapped model belongs to its mesh; copy or save model.module")

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
        if self._mesh.joined:
            which = "this" if self._attendance is not None else "another"
            raise ValueError(f"join: already inside a join of {which} model; one model at a time on a mesh")
        self._mesh.joined, self._attendance = True, Attendance(self._group)
        try:
            yield
            self._leave_failed()
            while num_active := self._attendance.count(False):
                self._gradients.shadow(num_active)
                for call in calls:
                    call()
        finally:
            self._mesh.joined, self._attendance = False, None

    def average_statistics(self) -> None:
        """Replaces the running statistics of batch normalisation by their mean over the ranks. Collective.

        Each rank weighs as much as it saw rows in training: the first dimension of the first tensor of each forward.
        Call it before an evaluation, and before weights are saved; without such layers it does nothing.
        """
        self._statistics.average(float(self._rows_seen))

    def _begin_if_ours(self, leaf) -> None:
        """The gradient of an output is known, in a backward or in torch.autograd.grad."""
        if leaf is None or will_add(leaf) or any(map(will_add, self._nodes)):
            self._begin()

    def _begin(self) -> None:
        """The first sign of a backward; later ones do nothing."""
        if self._backward is not None and self._backward() is not None:
            return
        self._leave_failed()
        check_unchanged(self.module, self._wrapped, self._gradients.parameters)
        for name in self._gradients.parameters:
            self._gradients.check(name)
        token = _Backward()
        self._backward, self._synchronises = weakref.ref(token), self._moves
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, token))
        if self._synchronises:
            attendance = self._attendance
            self._gradients.begin(attendance.count(True) if attendance else self._group.size)

    def _leave_failed(self) -> None:
        """The last backward ended by an exception, and its graph with it: nobody called _end."""
        if self._backward is not None:
            self._backward = None
            self._gradients.forget()

    def _before_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if not will_add(self._accumulators[name]):
            return
        if gradient.layout != torch.strided:
            refuse_sparse(name)
        self._begin()
        self._gradients.before(name)

    def _end(self, token: "_Backward") -> None:
        """The backward is over. Another model may have ended before on this rank, and after on others: start first."""
        if self._synchronises:
            self._gradients.start()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, token))
        else:
            self._backward = None

    def _finish(self, token: "_Backward") -> None:
        self._gradients.finish()
        self._backward = None


class _Backward:
    """Stands for one backward: only the callback that torch will make at its end holds it."""


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
