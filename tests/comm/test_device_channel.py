"""Channels between devices: what comes is what was put, in an order of work that holds with any device's timing."""

import pytest

from hpctrain.comm.cuda_aware import SWITCH
from tests.comm import device_channel_checks as checks
from tests.comm.test_device_ring import SAYS
from tests.planted.channel_bugs import BUGS

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def two_ranks(peers):
    if peers.size > 2:
        pytest.skip("two ranks tell all")


@pytest.mark.parametrize("path", SAYS)
@pytest.mark.parametrize("turn", range(3))
def test_what_is_taken_is_what_was_put(fresh_comm, monkeypatch, path, shared_seed, turn):
    monkeypatch.setenv(SWITCH, SAYS[path])
    assert checks.conversation(fresh_comm(), path, shared_seed + turn) == []


@pytest.mark.parametrize("name, path", [(name, path) for name, bug in BUGS.items() for path in bug.paths])
def test_the_check_sees_the_planted_bug(fresh_comm, peers, monkeypatch, shared_seed, name, path):
    monkeypatch.setenv(SWITCH, SAYS[path])
    bug = BUGS[name]
    with monkeypatch.context() as planted:
        planted.setattr(bug.target, bug.attribute, bug.planted)
        red = peers.everybody(checks.conversation(fresh_comm(), path, shared_seed))
    assert any(red), "no rank saw it"
    assert not any(peers.everybody(checks.conversation(fresh_comm(), path, shared_seed)))
