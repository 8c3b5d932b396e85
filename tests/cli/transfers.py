"""The doctor's proof with arrays that are not on a device: python transfers.py host|unmapped|lost|stuck|pretended."""

import sys
import time
from types import SimpleNamespace

import numpy as np

from hpctrain.tools import transfer


class HostArray:
    """Says that it is on a device, and lies where MPI can read it."""

    def __init__(self, values, local_rank):
        self.array = values.copy()
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (self.array.ctypes.data, False),
            "version": 3,
        }

    def values(self):
        return self.array


class UnmappedArray(HostArray):
    """Lies where this process has no memory, as memory of a device does for an MPI that knows nothing of it."""

    def __init__(self, values, local_rank):
        super().__init__(values, local_rank)
        self.__cuda_array_interface__["data"] = (1 << 46, False)


class LostArray(HostArray):
    """Loses the last element of long ones."""

    def values(self):
        return self.array if self.array.size == 1 else np.append(self.array[:-1], np.float32(-1))


class StuckArray(HostArray):
    def values(self):
        time.sleep(600)


class PretendedTorch:
    """A torch of which rank r's device, number r of two, is memory of the host."""

    cuda = SimpleNamespace(set_device=lambda device: is_own(device), synchronize=lambda: None)

    @staticmethod
    def from_numpy(values):
        return SimpleNamespace(to=lambda place: PretendedTensor(values, None))


class PretendedTensor(HostArray):
    def cpu(self):
        return SimpleNamespace(numpy=lambda: self.array)


def is_own(device):
    from mpi4py import MPI

    assert device == MPI.COMM_WORLD.rank


KINDS = {"host": HostArray, "unmapped": UnmappedArray, "lost": LostArray, "stuck": StuckArray}

if __name__ == "__main__":
    if sys.argv[1] == "stuck":
        transfer.LIMIT = 3
    if sys.argv[1] == "pretended":
        sys.modules["torch"], transfer.visible_devices = PretendedTorch, lambda: (["GPU-a", "GPU-b"], None)
        transfer.main()
    transfer.main(KINDS[sys.argv[1]])
