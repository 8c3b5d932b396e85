"""All gradients of a stage in one flat arena.

The arena is cut into buckets before the first step, in reverse layer order: the backward fills the last layers first,
and as soon as a bucket is full its sum over the replicas can begin to move, while earlier layers still compute. Every
`parameter.grad` is a view of the arena, zeroed instead of replaced, so nothing is packed or copied. A hook that finds
a gradient cut off (somebody called zero_grad(), which sets it to None) copies it in and attaches the view again.

What is handed out as `parameter.grad` is a tensor of its own, on the host with a storage of its own on the same memory:
torch swaps the storage inside (grad.data = ..., model.to(...), share_memory()), and the arena must not go with it.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from hpctrain.model.buckets import Bucket, Buckets

ALIGNMENT = 64  # bytes, for each parameter's gradient


class FlatGradients(Buckets):
    """Gradients of `parameters` (by name, in layer order), those that require none left out.

    `allocate(nbytes)` gives the arena as a writable uint8 array or tensor, where the parameters are. A bucket is closed
    when it holds `bucket_bytes` or more. During an armed backward `on_ready(bucket number)` is called for each complete
    bucket, in ascending order, and `on_gradient()` after each gradient; of parameters on a device in a thread that
    torch has for it, unless torch.autograd.set_multithreading_enabled(False) says otherwise.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], allocate: Callable, bucket_bytes: int):
        self.parameters = {name: p for name, p in reversed(parameters.items()) if p.requires_grad}
        self.touched = dict.fromkeys(self.parameters, False)
        self.buckets, self.views = [], {}
        self.on_ready: Callable[[int], None] = lambda number: None
        self.on_gradient: Callable[[], None] = lambda: None
        self._allocate_views(_cut(self.parameters, bucket_bytes), allocate)
        self._bucket_of = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        self._missing: list[set[str]] = []
        self._num_ready = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self.parameters.items()
        ]
        self.zero()

    def _allocate_views(self, groups: list[list[str]], allocate: Callable) -> None:
        sizes = [sum(_padded(self.parameters[name]) for name in names) for names in groups]
        self._memory = allocate(sum(sizes))
        self._arena = torch.as_tensor(self._memory)
        self._places: dict[str, slice] = {}
        self._handed: dict[str, torch.Tensor] = {}
        offset = 0
        for names, size in zip(groups, sizes):
            dtype = self.parameters[names[0]].dtype
            self.buckets.append(Bucket(names, self._arena[offset : offset + size].view(dtype)))
            for name in names:
                parameter = self.parameters[name]
                self._places[name] = slice(offset, offset + parameter.nbytes)
                self.views[name] = self._arena[self._places[name]].view(dtype).view(parameter.shape)
                offset += _padded(parameter)

    @property
    def flat(self) -> torch.Tensor:
        """The whole arena in one dimension, padding included. ValueError where gradients have several dtypes."""
        dtypes = sorted({str(bucket.flat.dtype) for bucket in self.buckets})
        if len(dtypes) > 1:
            raise ValueError(
                f"parameters of {' and '.join(dtypes)} do not lie in one arena; give all of them one dtype"
            )
        return self._arena.view(self.buckets[0].flat.dtype) if self.buckets else torch.empty(0)

    @property
    def places(self) -> dict[str, slice]:
        """Where each gradient lies in `flat`."""
        itemsize = self.flat.itemsize
        return {name: slice(each.start // itemsize, each.stop // itemsize) for name, each in self._places.items()}

    def places_within(self, bucket: Bucket) -> dict[str, slice]:
        """Where the gradients of a bucket lie in its `flat`."""
        first, itemsize = self._places[bucket.names[0]].start, bucket.flat.itemsize
        places = {name: self._places[name] for name in bucket.names}
        return {name: slice((p.start - first) // itemsize, (p.stop - first) // itemsize) for name, p in places.items()}

    def zero(self) -> None:
        """Begins a step: all gradients zero and attached, no parameter touched."""
        self._arena.zero_()
        self.touched = dict.fromkeys(self.parameters, False)
        self.disarm()
        self.attach(self.parameters)

    def attach(self, names) -> None:
        """Makes `grad` of the parameters named the view of the arena, and None of all others."""
        for name, parameter in self.parameters.items():
            if name not in names:
                parameter.grad = None
            elif not self.is_attached(name):
                self._hand_out(name)

    def is_attached(self, name: str) -> bool:
        """Whether `grad` of the parameter is the view of the arena."""
        return self._is_view(name, self.parameters[name].grad)

    def adopt(self, name: str) -> None:
        """Takes over what somebody, or torch, put in place of the view: the numbers, without their graph."""
        if not self.is_attached(name):
            grad = self.parameters[name].grad.detach()
            overlaps = grad.data_ptr() == self.views[name].data_ptr()  # the view itself, transposed
            self.views[name].copy_(grad.clone() if overlaps else grad)
            self._hand_out(name)

    def _hand_out(self, name: str) -> None:
        handed, view = self._handed.get(name), self.views[name]
        if not self._is_view(name, handed):
            handed = torch.as_tensor(self._memory[self._places[name]]).view(view.dtype).view(view.shape)
            self._handed[name] = handed
        self.parameters[name].grad = handed

    def _is_view(self, name: str, tensor: torch.Tensor | None) -> bool:
        view = self.views[name]
        return tensor is not None and tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride()

    def arm(self, names: Iterable[str] | None = None) -> None:
        """The next gradient is the last of the step, of all parameters or those named: report complete buckets."""
        if not self._armed:
            self._missing = [set(bucket.names) for bucket in self.buckets]
            self._num_ready = 0
        self._armed.update(self.parameters if names is None else names)

    def disarm(self) -> None:
        """The next backward only adds up."""
        self._armed: set[str] = set()
        self._missing, self._num_ready = [], len(self.buckets)

    def accumulate(self, name: str, gradient: torch.Tensor) -> None:
        """Adds a gradient that was not computed by a backward to this parameter."""
        self.views[name].add_(gradient)
        self._count(name)

    def flush(self) -> None:
        """Reports the buckets that no backward completed: their parameters were not used, their gradient is zero.

        So is the gradient of a parameter that was cut off and not used since.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                self.views[name].zero_()
                self.touched[name] = False
        if not self._armed:
            self.arm()
        while self._num_ready < len(self.buckets):
            self._report()

    def clip(self, longest: float) -> float:
        """Shortens the attached gradients together to norm `longest` where they are longer; returns their norm before.

        As torch's clip_grad_norm_ over the parameters in layer order, bit for bit.
        """
        return float(torch.nn.utils.clip_grad_norm_(list(self.parameters.values())[::-1], longest))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable:
        def hook(parameter: nn.Parameter) -> None:
            self.adopt(name)
            self._count(name)

        return hook

    def _count(self, name: str) -> None:
        self.touched[name] = True
        if name in self._armed:
            self._complete(name)

    def _complete(self, name: str) -> None:
        """The gradient of this parameter is whole; so may be its bucket, and those behind it."""
        bucket = self._bucket_of[name]
        if bucket < self._num_ready:
            raise RuntimeError(
                f"{name} got a second gradient in one backward, after its sum began to move: "
                "use it once, or checkpoint it with use_reentrant=False"
            )
        self._missing[bucket].discard(name)
        while self._num_ready < len(self.buckets) and not self._missing[self._num_ready]:
            self._report()
        self.on_gradient()

    def _report(self) -> None:
        number = self._num_ready
        self._num_ready += 1
        self.on_ready(number)


def _padded(parameter: nn.Parameter) -> int:
    return -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT


def _cut(parameters: Mapping[str, nn.Parameter], bucket_bytes: int) -> list[list[str]]:
    """Names by bucket: consecutive, of one dtype, closed when `bucket_bytes` are reached."""
    groups: list[list[str]] = []
    size, dtype = 0, None
    for name, parameter in parameters.items():
        if not groups or size >= bucket_bytes or parameter.dtype != dtype:
            groups.append([])
            size, dtype = 0, parameter.dtype
        groups[-1].append(name)
        size += _padded(parameter)
    return groups
