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


def has_room(ring: Ring, nbytes: int) -> bool:
    """Whether /dev/shm takes so many bytes, and as many again for others. Collective, told once."""
    free = shared_memory_free()
    lacking = np.array([free is not None and free < 2 * nbytes], np.int32)
    ring.one_shot(lacking, "room in shared memory").start().wait()
    if lacking[0] and ring.rank == 0:
        print(
            f"hpctrain: {SHARED_MEMORY} has {(free or 0) >> 20} MiB free, and {2 * nbytes >> 20} are wanted: sums go "
            "by messages, which is slower; in a container: --shm-size=1g",
            file=sys.stderr,
        )
    return not lacking[0]
