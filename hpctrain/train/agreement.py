"""What all ranks tell each other once a step, so that all decide alike."""

from collections.abc import Iterable

import numpy as np

from hpctrain.comm.mesh import Mesh

LOSS = "loss"


class Agreement:
    """The one small exchange of a step: loss, items, norm, what is not finite on which rank, which parameters anybody
    touched, who was asked to stop.

    It is one vector of float64, summed over all ranks: [loss, squared norm, requests to stop, items of each replica,
    fault of each rank, uses of each parameter]. `names` are all parameters of the model, the same list on every rank. A
    fault is 0, or 1 for the loss, 2 + 2 * the number of a parameter for its gradient, one more for the sum of its
    gradients.
    """

    def __init__(self, names: list[str], mesh: Mesh):
        self._numbers = {name: number for number, name in enumerate(names)}
        self._names = names
        self._rank, self._replica = mesh.rank, mesh.replica
        replicas, ranks = mesh.grid.num_replicas, mesh.grid.num_ranks
        self._vector = np.zeros(3 + replicas + ranks + len(names))
        self._items, self._faults, self._uses = np.split(self._vector[3:], np.cumsum([replicas, ranks]))
        self._exchange = mesh.everybody.ring.one_shot(self._vector, "agree")

    def clear(self) -> None:
        self._vector[:] = 0

    def add_loss(self, loss: float, items: float) -> None:
        if np.isfinite(loss):
            self._vector[0] += loss
            self._items[self._replica] += items
        else:
            self.report(LOSS)

    def add_squared_norm(self, value: float) -> None:
        """This rank's share in the square of the norm of all gradients."""
        self._vector[1] += value

    def report(self, name: str, of_sum: bool = False) -> None:
        """This rank's loss, or the gradient of the parameter named, is not finite; the first report stands.

        `of_sum`: the sum over the replicas is not, and this rank speaks for all of them.
        """
        if not self._faults[self._rank]:
            self._faults[self._rank] = 1 if name == LOSS else 2 + 2 * self._numbers[name] + of_sum

    def touch(self, names: Iterable[str]) -> None:
        for name in names:
            self._uses[self._numbers[name]] = 1

    def ask_to_stop(self) -> None:
        """This rank was asked to leave; all are to, after this step."""
        self._vector[2] = 1

    def exchange(self) -> None:
        self._exchange.start()
        self._exchange.wait()

    @property
    def loss(self) -> float:
        return float(self._vector[0])

    @property
    def stop(self) -> bool:
        return bool(self._vector[2])

    @property
    def norm(self) -> float:
        return float(np.sqrt(self._vector[1]))

    @property
    def items(self) -> float:
        """Of all replicas: a whole number, unless the task weighs its items by fractions."""
        return whole(float(self._items.sum()))

    @property
    def own_items(self) -> float:
        """Of this replica."""
        return float(self._items[self._replica])

    def touched(self) -> set[str]:
        """Parameters that got a gradient on any rank."""
        return {name for name, uses in zip(self._names, self._uses) if uses}

    def fault(self) -> str | None:
        """What is not finite, and on which rank; None when all is well."""
        own, sums = [], []
        for rank, fault in enumerate(map(int, self._faults)):
            if fault == 1:
                own.append(f"the loss on rank {rank}")
            elif fault:
                name = self._names[(fault - 2) // 2]
                if fault % 2:
                    sums.append(f"the sum of the gradients of {name} over all ranks is not finite")
                else:
                    own.append(f"the gradient of {name} on rank {rank}")
        return f"not finite: {', '.join(own)}" if own else next(iter(sums), None)


def whole(items: float) -> float:
    """A count as an integer where it is one."""
    return int(items) if items == int(items) else items
