"""The backward of a micro-batch in two parts: B, which other stages wait for, and W, which nobody waits for.

B is a plain `backward()`, but of linear maps and convolutions it computes the gradient of their inputs only. W computes
that of their weights and biases, when there is time (Qi et al., Zero Bubble, ICLR 2024). Both together give the bits of
a whole backward, as torch computes both: each such call gets a small graph of its own, from aliases of its inputs,
weight and bias to its outputs, and B and W ask it for one half each.

A parameter whose gradient is more than that gets all of it in B: one that two modules share, that has hooks, or that
other functions take too (where autocast casts it for both, the first such micro-batch may differ in rounding).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpctrain.model.structure import tensors_in

FUNCTIONS = {functional.linear} | {getattr(functional, f"conv{way}{n}d") for way in ("", "_transpose") for n in "123"}


class Deferred:
    """W of one backward: gradients of weights and biases that are still to be computed."""

    def __init__(self, work: Iterable[tuple["_Call", Tensor]] = ()):
        self._work: dict[int, list[tuple[_Call, Tensor]]] = {}
        for call, gradient in work:
            self._work.setdefault(id(call.leaves[0]), []).append((call, gradient))

    def __bool__(self) -> bool:
        return bool(self._work)

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps in memory: the inputs of each call and the gradient of its outputs."""
        for call, gradient in chain.from_iterable(self._work.values()):
            yield from (call.inputs, gradient)

    def run(self, accumulate: Callable[[str, Tensor], None]) -> None:
        """Calls accumulate(name, gradient) once for each parameter, and lets go of what was kept for it."""
        for key in list(self._work):
            uses = self._work.pop(key)  # of one weight: torch adds up what all of them give
            leaves = {id(leaf): (name, leaf) for call, _ in uses for name, leaf in zip(call.names, call.leaves)}
            names, wanted = zip(*leaves.values())
            outputs, gradients = [call.outputs for call, _ in uses], [gradient for _, gradient in uses]
            for name, gradient in zip(names, torch.autograd.grad(outputs, wanted, gradients)):
                accumulate(name, gradient)


class SplitBackward:
    """Splits the backward of `layers`, of which `parameters` are the parameters by global name.

    `names` are those that W may give a gradient to: weights that one module has for itself, and biases beside them.
    """

    def __init__(self, layers: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]):
        self.parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.names = frozenset(self._names[key] for key in _alone(layers) if key in self._names)
        self.whole: set[str] = set()  # those that something else takes too
        self._deferred: set[str] = set()
        self._aliases: dict[str, Tensor] = {}
        self._weights: dict[str, str] = {}  # by bias, which can have one only
        self._work: list[tuple[_Call, Tensor]] = []

    @property
    def unsplit(self) -> list[str]:
        """Parameters of two or more dimensions, in layer order, that no backward so far left to W."""
        split = self._deferred - self.whole
        return [n for n, p in self.parameters.items() if p.requires_grad and p.dim() >= 2 and n not in split]

    def forward(self) -> "_Splitting":
        """A context: a forward inside it has a backward that leaves W to do; without a graph it is as any other."""
        return _Splitting(self)

    def take(self) -> Deferred:
        """What the backwards since the last call left to do."""
        work, self._work = self._work, []
        return Deferred(work)

    def defer(self, call: "_Call", gradient: Tensor) -> bool:
        """Leaves weight and bias of the call to W; False if they have been used in another way since."""
        if is_free := self.whole.isdisjoint(call.names):
            self._deferred.update(call.names)
            self._work.append((call, gradient))
        return is_free

    def named(self, values: Iterable[Any]) -> Iterator[str]:
        """Names of the parameters among the arguments of a function."""
        for value in values:
            if isinstance(value, (list, tuple)):
                yield from self.named(value)
            elif id(value) in self._names:
                yield self._names[id(value)]

    def leaves(self, weight: Tensor, bias: Any) -> dict[str, Tensor] | None:
        """Aliases of both by name, a bias left out that requires no gradient; None where they cannot be split."""
        tensors = [weight, bias] if isinstance(bias, Tensor) and bias.requires_grad else [weight]
        names = [self._names.get(id(tensor)) for tensor in tensors]
        is_free = self.names.issuperset(names) and self.whole.isdisjoint(names)
        is_free = is_free and all(tensor.requires_grad and not tensor._backward_hooks for tensor in tensors)
        if not is_free or self._weights.setdefault(names[-1], names[0]) != names[0]:
            return None
        return {name: self._alias(name) for name in names}

    def _alias(self, name: str) -> Tensor:
        """One leaf for all uses, as the parameter itself is: autocast keeps one copy of it in half precision."""
        if name not in self._aliases or not self._aliases[name].is_set_to(self.parameters[name]):
            self._aliases[name] = self.parameters[name].detach().requires_grad_()
        return self._aliases[name]


class _Splitting(TorchFunctionMode):
    """Sees each torch function that a forward calls: splits those of FUNCTIONS, takes note of all others."""

    def __init__(self, split: SplitBackward):
        super().__init__()
        self.split = split
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in FUNCTIONS and torch.is_grad_enabled():
            outputs = self._split(function, *args, **kwargs)
            if outputs is not None:
                return outputs
        result = function(*args, **kwargs)
        names = list(self.split.named((*args, *kwargs.values())))
        if names and any(tensor.grad_fn is not None for tensor in tensors_in(result)):
            self.split.whole.update(names)
        return result

    def _split(self, function, input=None, weight=None, bias=None, *others, **named) -> Tensor | None:
        """Outputs of the call, None where it cannot be split."""
        if not all(isinstance(tensor, Tensor) for tensor in (input, weight)) or _is_watched():
            return None
        self.split.whole.update(self.split.named([input]))
        if (leaves := self.split.leaves(weight, bias)) is None:
            return None
        parameters, fixed = [self.split.parameters[name] for name in leaves], (bias,)[len(leaves) - 1 :]
        call = _Call(self.split, leaves, lambda *tensors: function(*tensors, *fixed, *others, **named))
        return _InputGradient.apply(call, self._cast(input), *parameters)

    def _cast(self, inputs: Tensor) -> Tensor:
        """As autocast casts inputs, if it is on: a leaf once, so that its gradients add up in half precision."""
        kind = inputs.device.type
        if not (torch.is_autocast_enabled(kind) and inputs.is_floating_point() and inputs.dtype != torch.float64):
            return inputs
        dtype = torch.get_autocast_dtype(kind)
        if not (inputs.is_leaf and inputs.requires_grad and inputs.dtype == torch.float32):
            return inputs.to(dtype)
        if id(inputs) not in self._casts:
            self._casts[id(inputs)] = (inputs, inputs.to(dtype))
        return self._casts[id(inputs)][1]


class _Call:
    """One call of `function`: a graph of its own, from `inputs` and `leaves` (of weight and bias) to `outputs`."""

    def __init__(self, split: SplitBackward, leaves: Mapping[str, Tensor], function: Callable[..., Tensor]):
        self.split, self.names, self.leaves, self.function = split, tuple(leaves), tuple(leaves.values()), function

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.inputs = inputs.detach().requires_grad_(inputs.requires_grad)
        with torch.enable_grad():
            outputs = self.function(self.inputs, *self.leaves)
            self.outputs = _End.apply(outputs)
        return outputs.data  # what is done to them in place does not concern this graph

    def backward(self, gradient: Tensor, whole: bool) -> list[Tensor | None]:
        """Gradients of inputs, weight and bias; the latter are None unless `whole`."""
        tensors = [self.inputs, *(self.leaves if whole else [None] * len(self.leaves))]
        return _gradients(self.outputs, tensors, gradient, retain_graph=True)

    def differentiable(self, gradient: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Gradients of `tensors`, which are inputs, weight and bias, that can be differentiated again."""
        with torch.autocast(*self.autocast):
            return _gradients(self.function(*tensors), tensors, gradient, create_graph=True)


class _End(torch.autograd.Function):
    """The end of a graph without its numbers: their shape, in the memory of one."""

    forward = staticmethod(lambda ctx, outputs: outputs.new_zeros(()).expand(outputs.shape))
    backward = staticmethod(lambda ctx, gradient: gradient)


class _InputGradient(torch.autograd.Function):
    """A call as one node of the graph around it."""

    @staticmethod
    def forward(ctx, call: _Call, inputs: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs, *parameters)
        ctx.call = call
        return call.forward(inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor | None):
        call = ctx.call
        if gradient is None:
            return (None, None, *(None for _ in call.names))
        if torch.is_grad_enabled():  # create_graph=True
            call.split.whole.update(call.names)
            return (None, *call.differentiable(gradient, ctx.saved_tensors))
        adds, returns = _purpose(node for node, _ in ctx.next_functions[1:])
        return (None, *call.backward(gradient, whole=returns or (adds and not call.split.defer(call, gradient))))


def _gradients(outputs: Tensor, tensors: Iterable[Tensor | None], gradient: Tensor, **options) -> list[Tensor | None]:
    """Gradients of those of `tensors` that require one, None for the others."""
    wanted = [tensor is not None and tensor.requires_grad for tensor in tensors]
    some = list(compress(tensors, wanted))
    found = iter(torch.autograd.grad(outputs, some, gradient, **options) if some else ())
    return [next(found) if is_wanted else None for is_wanted in wanted]


def _purpose(nodes: Iterable) -> tuple[bool, bool]:
    """Whether the running backward adds to `grad` of the parameters of `nodes`; whether it returns theirs instead."""
    try:
        return any(torch._C._will_engine_execute_node(node) for node in nodes), False
    except RuntimeError:  # "we are currently running autograd.grad()"
        return False, True


def _is_watched() -> bool:
    """Whether torch.func transforms the call, or somebody replaces what it saves, as torch.utils.checkpoint does."""
    try:
        with disable_saved_tensors_hooks(""):
            return torch._C._are_functorch_transforms_active()
    except RuntimeError:
        return True


def _alone(layers: Iterable[nn.Module]) -> Iterator[int]:
    """Ids of the parameters that one module has under one name, of modules that have a matrix or a kernel."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    own = [[p for _, p in m.named_parameters(recurse=False, remove_duplicate=False)] for m in modules]
    places = Counter(id(parameter) for parameters in own for parameter in parameters)
    for parameters in own:
        if any(parameter.dim() >= 2 for parameter in parameters):
            yield from (id(p) for p in parameters if p.requires_grad and places[id(p)] == 1)
