"""Which ranks share memory, and how much of it there is."""

import contextlib
import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from hpctrain.comm.environment import SHARED_MEMORY, shared_memory_free
from hpctrain.comm.ring import Ring


def name_of_node() -> int:
    """The same for processes that MPI lets share memory: one host name, one kernel, one /dev/shm."""
    from mpi4py import MPI

    parts = [MPI.Get_processor_name()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(os.stat(SHARED_MEMORY).st_dev)]
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def has_room(ring: Ring, nbytes: int, num_rings: int) -> bool:
    """Whether /dev/shm takes so many bytes for each of `num_rings` that ask at a time, and as many again for others.

    Collective; where it does not, rank 0 says so.
    """
    free, wanted = np.zeros(ring.size, np.int64), (1 + num_rings) * nbytes
    free[ring.rank] = shared_memory_free() or 0
    ring.one_shot(free, "room in shared memory").start().wait()
    if (least := int(free.min())) >= wanted:
        return True
    if ring.rank == 0:
        print(
            f"hpctrain: {SHARED_MEMORY} has {least >> 20} MiB free, and {wanted >> 20} MiB are wanted: sums are slower "
            "without; in a container: --shm-size=1g",
            file=sys.stderr,
        )
    return False
