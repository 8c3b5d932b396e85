"""Who waits leaves the cores to who computes: under 5 % of a core in every place where a rank waits.

Rank 0 computes for a second before it comes; the share of a core that each other rank used meanwhile is measured.
"""

import numpy as np
import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import Mesh, duplicate
from tests.comm import checks

SIZES = (2, 8)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["ring", "barrier", "start", "end"])
def test_a_waiting_rank_uses_next_to_nothing(comm, peers, place, record_property):
    if peers.size not in SIZES:
        pytest.skip(f"{SIZES} ranks measure it")
    problems, shares = checks.waiting(comm, peers, lambda: _place_to_wait(comm, place), seconds=1.0)
    shown = ", ".join(f"{share:.1%}" for share in shares)
    record_property("waiting_shares", shown)
    if peers.rank == 0:
        print(f"waiting in {place}: {shown} of a core")
    assert problems == []


def _place_to_wait(comm, place: str):
    group, built = Group(duplicate(comm)), []
    wait = {
        "ring": lambda: group.ring.all_reduce(np.ones(1000)).wait(),
        "barrier": group.barrier,
        "start": lambda: built.append(Mesh(comm)),
        "end": group.close,
    }[place]
    return wait, lambda: [one.close() for one in (*built, group)]
