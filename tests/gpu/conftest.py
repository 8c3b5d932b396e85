"""Nothing is collected where a device, a torch built with CUDA or CuPy is missing: machine.py says which."""

import pytest

from tests.gpu.machine import missing

collect_ignore_glob = ["test_*.py"] if missing() else []


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
