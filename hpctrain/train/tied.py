"""Parameters that are one and have copies on several stages: an embedding that is the output matrix too.

The copies start equal, their gradients are added up before each step, and so they stay equal: all stages that hold one
step with the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.model.gradients import FlatGradients


class TiedWeights:
    """Of `sets` of names that are one parameter, those whose names lie on several stages. Collective.

    `described` are all parameters of the model, `parameters` those that this rank holds. `adds_up`: whether this stage
    has gradients of such parameters to add up; frozen ones have none.
    """

    def __init__(self, sets: Iterable[Sequence[str]], described: Mapping, parameters: Mapping, mesh: Mesh):
        self.sets = [names for names in sets if len({described[name].stage for name in names}) > 1]
        self._canonical = {name: names[0] for names in self.sets for name in names}
        self._shapes = {names[0]: torch.Size(described[names[0]].shape) for names in self.sets}
        self._held = {self._canonical[name]: name for name in parameters if name in self._canonical}
        self._group = mesh.part_of_pipe(bool(self._held)) if self.sets else None
        self.adds_up = self._group is not None and any(described[names[0]].is_trained for names in self.sets)
        like = next(iter(parameters.values()), torch.empty(0))
        self._dtype, self._device = like.dtype, like.device
        stages = sorted({described[name].stage for name in self._canonical})
        for names in self.sets if self._group is not None else ():
            self._broadcast(parameters, names[0], stages.index(described[names[0]].stage))

    @property
    def names(self) -> set[str]:
        """Of this rank's parameters that other stages hold too."""
        return set(self._held.values())

    def canonical(self, name: str) -> str:
        """The name, in model order the first, that stands for a parameter and all its copies."""
        return self._canonical.get(name, name)

    def own(self, names: Iterable[str]) -> list[str]:
        """Without those that are copies of a parameter on an earlier stage."""
        return [name for name in names if self.canonical(name) == name]

    def add_up(self, gradients: FlatGradients) -> None:
        """Gives all copies the sum of their gradients, the same bits. Collective over the stages that hold one."""
        views = {first: gradients.views[name] for first, name in self._held.items() if name in gradients.views}
        lengths = [shape.numel() for shape in self._shapes.values()]
        total = torch.zeros(sum(lengths), dtype=self._dtype, device=self._device)
        pieces = dict(zip(self._shapes, total.split(lengths)))
        for first, view in views.items():
            pieces[first].copy_(view.flatten())
        self._group.ring.all_reduce(total, "tied weights").wait()
        for first, view in views.items():
            view.copy_(pieces[first].view_as(view))

    def _broadcast(self, parameters: Mapping[str, torch.nn.Parameter], first: str, root: int) -> None:
        """The first copy replaces the others, so that they start equal."""
        held = self._held.get(first)
        values = torch.empty(self._shapes[first], dtype=self._dtype)
        if held:
            values.copy_(parameters[held].detach())
        self._group.broadcast(values, root)
        if held:
            with torch.no_grad():
                parameters[held].copy_(values)
