"""The gradients of a model in a loop of the user's own: made global once in each synchronised backward.

They lie in the arena of model/gradients.py. What is in a `parameter.grad` when a backward begins is this rank's own, or
it is global already, from a backward before that nobody zeroed: then all ranks hold it, and a sum over them would
count it n times. The mean of n equal values is right by itself; for a sum, each rank keeps one nth of it.
"""

from collections.abc import Mapping

import numpy as np
from torch import nn

from hpctrain.comm.device_buffer import allocator
from hpctrain.comm.mesh import Mesh
from hpctrain.model.compressors import Compressor
from hpctrain.model.gradients import FlatGradients
from hpctrain.plan.compression import is_summed_in_place
from hpctrain.train.feedback import reduction_of


class GlobalGradients:
    """Gradients of `parameters`, as `reduction` ("mean", "sum") over the ranks of `mesh.data`. Collective.

    A backward that synchronises goes from `begin` over `start` to `finish`; before each gradient that any backward
    adds, `before`. Models that share a backward all start before the first one waits.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        reduction: str,
        bucket_bytes: int,
        algorithm: str,
        compress: str | Compressor = "none",
    ):
        group = mesh.add_group()
        self._name, self._meeting = f"model {len(mesh.groups) - 1}", mesh.meeting
        device = next(iter(parameters.values())).device
        in_windows = device.type == "cpu" and is_summed_in_place(algorithm, compress)
        self._flat = FlatGradients(parameters, group.allocate if in_windows else allocator(device), bucket_bytes)
        self._flat.attach(())
        self._sums = reduction_of(self._flat, group.ring, algorithm, compress)
        self._flat.on_ready, self._flat.on_gradient = self._sums.start, group.progress.poll
        self.parameters, self.counters = self._flat.parameters, group.ring.counters
        self._mean = reduction == "mean"
        self._num_active = group.size
        self._global: set[str] = set()  # parameters whose grad all ranks hold
        self._used = np.zeros(len(self.parameters), np.int32)
        self._agreement = group.ring.one_shot(self._used, "parameters used")

    def check(self, name: str) -> None:
        """ValueError where the parameter was converted since."""
        parameter, view = self.parameters[name], self._flat.views[name]
        if parameter.dtype != view.dtype or parameter.shape != view.shape:
            now, then = (f"{each.dtype} {list(each.shape)}" for each in (parameter, view))
            raise ValueError(f"DataParallel: {name} is {now} and was {then} when wrapped; convert the model, then wrap")

    def begin(self, num_active: int) -> None:
        """The backward that begins is synchronised, `num_active` ranks have a share in it."""
        self._have_share(num_active)
        self._flat.arm()

    def before(self, name: str) -> None:
        """A backward is about to add to the gradient of this parameter."""
        if name in self._global:
            self._global.discard(name)
            if not self._mean and self.parameters[name].grad is not None:
                self._flat.adopt(name)  # never divide in a tensor of the user's
                self._flat.views[name].div_(self._num_active)

    def start(self) -> None:
        """All gradients are there: everything that is not on its way yet begins to move, and nothing is waited for."""
        for name, parameter in self.parameters.items():
            self.before(name)
            if parameter.grad is not None:
                self._flat.adopt(name)
        self._flat.flush()
        self._sums.go_on()
        self._used[:] = [parameter.grad is not None for parameter in self.parameters.values()]
        self._agreement.start()
        self._meeting.expect(self._name)

    def finish(self) -> None:
        """Waits until the gradients are global. None where no rank has one. Collective."""
        self._meeting.start()
        self._sums.wait()
        self._agreement.wait()
        self._meeting.wait()
        self._flat.disarm()
        self._global = {name for name, uses in zip(self.parameters, self._used) if uses}
        self._sums.settle(True, self._global)
        self._flat.attach(self._global)

    def shadow(self, num_active: int) -> None:
        """Takes part in a backward of others, with nothing of this rank's own. Collective."""
        self._global.clear()
        self._flat.attach(())
        self._have_share(num_active)
        self.start()
        self.finish()

    def _have_share(self, num_active: int) -> None:
        self._num_active = num_active
        for collective in self._sums.collectives if self._mean else ():
            collective.divisor = num_active

    def forget(self) -> None:
        """The backward that began did not end: an exception came between. What moves already is waited for."""
        self._flat.disarm()
        self._sums.forget()
        self._meeting.forget(self._name)
        for collective in (*self._sums.collectives, self._agreement):
            if not collective.done:
                collective.wait()
