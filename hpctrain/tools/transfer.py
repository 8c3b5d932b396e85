"""Two ranks exchange arrays in device memory: the proof of what layers say about MPI, for a job of its own.

Where MPI does not take device memory, such a message ends its process by a segmentation fault. So the doctor starts it,
and no run does. An array tells where its memory is by `__cuda_array_interface__` alone, as those of every library do.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable

import numpy as np

from hpctrain.comm.abort import abort_on_error, leave
from hpctrain.comm.devices import visible_devices
from hpctrain.comm.progress import wait_until
from hpctrain.comm.start import start_mpi
from hpctrain.plan.devices import choose

SIZES = (1, 1 << 14, 1 << 20)  # elements of float32: MPI sends them in different ways
LIMIT = 40  # seconds; then a rank ends by itself, before anybody has to kill mpirun


class DeviceArray:
    """A copy of `values`, float32, on the device of the rank with this number on its node."""

    def __init__(self, values: np.ndarray, local_rank: int):
        import torch

        torch.cuda.set_device(choose(len(visible_devices()[0]), local_rank))
        self.tensor = torch.from_numpy(values).to("cuda")
        torch.cuda.synchronize()  # MPI knows nothing of streams
        self.__cuda_array_interface__ = self.tensor.__cuda_array_interface__

    def values(self) -> np.ndarray:
        return self.tensor.cpu().numpy()


def main(make: Callable = DeviceArray) -> None:
    """The program of both ranks; ends with 1 where an element is wrong. `make`: an array like DeviceArray."""
    faulthandler.enable()
    signal.alarm(LIMIT)
    with abort_on_error():
        world = start_mpi()
        wrong = num_wrong(world, make)
        if wrong:
            print(f"rank {world.rank}: {wrong} elements are wrong", file=sys.stderr)
    leave(int(wrong > 0))


def num_wrong(comm, make: Callable) -> int:
    """How many elements this rank did not get right from the other one of two."""
    wrong = 0
    for size in SIZES:
        numbers = np.arange(size, dtype=np.float32)
        sent, received = make(numbers + comm.rank, comm.rank), make(numbers - 1, comm.rank)
        requests = [comm.Irecv(received, 1 - comm.rank), comm.Isend(sent, 1 - comm.rank)]
        wait_until(lambda pending=requests: all(request.Test() for request in pending))
        wrong += int((received.values() != numbers + 1 - comm.rank).sum())
    return wrong
