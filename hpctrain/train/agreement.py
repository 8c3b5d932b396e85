"""What the replicas tell each other once a step, so that all decide alike."""

from collections.abc import Iterable

import numpy as np

from hpctrain.comm.mesh import Mesh

LOSS = "loss"


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

    def add_loss(self, loss: float, items: float) -> None:
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
    def items(self) -> float:
        """A whole number, unless the task weighs its items by fractions."""
        items = float(self._vector[1])
        return int(items) if items == int(items) else items

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
