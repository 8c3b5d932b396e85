"""More than 2^31 - 1 bytes at a time, on two ranks: nothing counts in 32 bits."""

import numpy as np
import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import duplicate

LENGTH = 2**31 + 16


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(120)
def test_more_than_two_gigabytes_are_summed_and_broadcast(comm, peers):
    if peers.size != 2:
        pytest.skip("two ranks are enough, and need 4 GiB")
    group = Group(duplicate(comm))
    array = np.ones(LENGTH, np.uint8)
    array[-1] = 7
    group.ring.all_reduce(array).wait()
    assert (int(array[0]), int(array[2**31 - 1]), int(array[-1])) == (2, 2, 14)
    assert (array.min(), array[:-1].max()) == (2, 2)
    assert group.ring.counters.bytes_sent == LENGTH
    array[:] = peers.rank
    array[-1] = 9 - peers.rank
    group.broadcast(array)
    assert not array[:-1].any() and array[-1] == 9
    group.close()
    del array  # now, and not while a later test measures
