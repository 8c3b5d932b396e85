"""Ranks that can tell each other things, and communicators that one test has to itself."""

import json
import time

import pytest


class Peers:
    """All ranks of the launch, apart from the code under test."""

    def __init__(self, ranks):
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    def everybody(self, value=None) -> list:
        """Each rank's `value` (JSON), by rank; also a barrier. Collective, waits politely."""
        return [json.loads(text) for text in self._ranks.gather(json.dumps(value))]


@pytest.fixture(scope="session")
def _ranks():
    from mpi4py import MPI

    from tests.harness.ranks import Ranks

    ranks = Ranks(MPI.COMM_WORLD)
    yield ranks
    ranks.close()


@pytest.fixture
def peers(_ranks) -> Peers:
    return Peers(_ranks)


@pytest.fixture
def fresh_comm():
    """Makes a communicator of all ranks that is never given back: for what leaves messages behind. Collective."""
    from mpi4py import MPI

    def make():
        copy, request = MPI.COMM_WORLD.Idup()
        while not request.Test():
            time.sleep(1e-4)
        return copy

    return make


@pytest.fixture
def comm(peers, fresh_comm):
    """A communicator of all ranks that only this test uses, given back at the end."""
    copy = fresh_comm()
    yield copy
    peers.everybody()
    copy.Free()


@pytest.fixture
def make_ring(comm):
    """Makes rings over `comm` (or a wrapper of it), closed at the end: nothing stays posted. Collective."""
    from hpctrain.comm.ring import Ring

    rings = []

    def make(*arguments, wrapper=None, **options):
        rings.append(Ring(wrapper or comm, *arguments, **options))
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()
