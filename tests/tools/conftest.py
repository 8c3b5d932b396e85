"""A private communicator over all ranks of the launch, for each test."""

from tests.train.conftest import comm as comm
