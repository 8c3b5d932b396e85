"""A private communicator over all ranks of the launch, for each test."""

import pytest


@pytest.fixture
def comm():
    from mpi4py import MPI

    copy = MPI.COMM_WORLD.Dup()
    yield copy
    copy.Free()
