import pytest

from tests.hosts.emulated import hosts


@pytest.fixture(scope="session")
def four():
    """Four hosts, joined by links of 1 Gbit/s."""
    with hosts(4) as cluster:
        yield cluster
