"""Each check of this layer turns red on a planted bug; the same check is green without it."""

import numpy as np
import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import duplicate
from hpctrain.comm.ring import Ring
from tests.comm import checks
from tests.planted.comm_bugs import BUGS

pytestmark = pytest.mark.mpi(min_size=2)
MOST_RANKS = 4
NAMES_DIFFER = (("all_reduce", "float32", 4, "loss"), ("all_reduce", "float32", 4, "grad"))


def _sums(comm, peers):
    return checks.sums(comm, peers, "float64", [5, 300], segment_bytes=200)


def _guards(comm, peers):
    return checks.sums(comm, peers, "int32", [5, 100], segment_bytes=200)


def _half(comm, peers):
    return checks.sums(comm, peers, "float16", [1000])


def _buffers(comm, peers):
    return checks.buffer_rules(comm)


def _traffic(comm, peers):
    return checks.traffic(comm)


def _disagreement(comm, peers):
    return checks.disagreement(comm, seed=1, calls=NAMES_DIFFER, odd=0)


def _refusal(comm, peers):
    ring = Ring(comm)
    ring.channel._broken = "ranks disagree"
    problems = checks._accepted(ring, [])
    ring.close()
    return problems


def _waiting(comm, peers):
    group = Group(duplicate(comm))
    problems, _ = checks.waiting(comm, peers, lambda: (group.barrier, lambda: None), seconds=0.4)
    group.close()
    return problems


CHECKS = {
    "sums": _sums,
    "guards": _guards,
    "half": _half,
    "buffers": _buffers,
    "traffic": _traffic,
    "disagreement": _disagreement,
    "refusal": _refusal,
    "waiting": _waiting,
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_check_sees_the_planted_bug(fresh_comm, peers, monkeypatch, bug):
    if not bug.min_size <= peers.size <= MOST_RANKS:
        pytest.skip(f"{bug.min_size} to {MOST_RANKS} ranks show it")
    check = CHECKS[bug.check]
    with monkeypatch.context() as planted, np.errstate(all="ignore"):
        planted.setattr(bug.target, bug.attribute, bug.planted)
        red = peers.everybody(check(fresh_comm(), peers))
    assert any(red), "no rank saw it"
    assert not any(peers.everybody(check(fresh_comm(), peers)))


def test_every_check_is_tried():
    assert {bug.check for bug in BUGS.values()} == set(CHECKS)
