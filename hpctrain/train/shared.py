"""Parameters that are one and have copies on several stages: an embedding that is the output matrix too.

The copies start equal, their gradients are added up before each step, and so they stay equal: all stages that hold one
step with the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.model.gradients import FlatGradients


class SharedWeights:
    """Of `sets` of names that are one parameter, those whose names lie on several stages. Collective.

    `stage_of` and `shapes` are those of all parameters of the model, `parameters` what this rank holds of them.
    """

    def __init__(
        self,
        sets: Iterable[Sequence[str]],
        stage_of: Mapping[str, int],
        shapes: Mapping[str, list[int]],
        parameters: Mapping[str, torch.nn.Parameter],
        mesh: Mesh,
    ):
        self.sets = [names for names in sets if len({stage_of[name] for name in names}) > 1]
        self._canonical = {name: names[0] for names in self.sets for name in names}
        self._shapes = {names[0]: torch.Size(shapes[names[0]]) for names in self.sets}
        self._held = {self._canonical[name]: name for name in parameters if name in self._canonical}
        self._group = mesh.part_of_pipe(self.is_here) if self.sets else None
        stages = sorted({stage_of[name] for name in self._canonical})
        for names in self.sets if self._group is not None else ():
            self._broadcast(parameters, names[0], stages.index(stage_of[names[0]]))

    @property
    def is_here(self) -> bool:
        """Whether this stage holds a copy."""
        return bool(self._held)

    def canonical(self, name: str) -> str:
        """The name, in model order the first, that stands for a parameter and all its copies."""
        return self._canonical.get(name, name)

    def own(self, names: Iterable[str]) -> list[str]:
        """Without those that are copies of a parameter on an earlier stage."""
        return [name for name in names if self.canonical(name) == name]

    def add_up(self, gradients: FlatGradients) -> None:
        """Gives all copies the sum of their gradients, the same bits. Collective over the stages that hold one."""
        views = {first: gradients.views[name] for first, name in self._held.items() if name in gradients.views}
        dtype = next(iter(views.values())).dtype
        total = torch.zeros(sum(shape.numel() for shape in self._shapes.values()), dtype=dtype)
        pieces = dict(zip(self._shapes, total.split([shape.numel() for shape in self._shapes.values()])))
        for first, view in views.items():
            pieces[first].copy_(view.flatten())
        self._group.ring.all_reduce(total, "tied weights").wait()
        for first, view in views.items():
            view.copy_(pieces[first].view_as(view))

    def _broadcast(self, parameters: Mapping[str, torch.nn.Parameter], first: str, root: int) -> None:
        """The first copy replaces the others, so that they start equal."""
        held = self._held.get(first)
        dtype = next(iter(parameters.values())).dtype
        values = parameters[held].detach().clone() if held else torch.empty(self._shapes[first], dtype=dtype)
        self._group.broadcast(values, root)
        if held:
            with torch.no_grad():
                parameters[held].copy_(values)
