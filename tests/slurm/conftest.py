import pytest

from tests.slurm.cluster import slurm


@pytest.fixture(scope="session")
def cluster():
    """A Slurm with three nodes."""
    with slurm(3) as cluster:
        yield cluster
