"""Files that this process has open, by their paths: others come and go while a test runs."""

import os

import pytest


def open_below(folder) -> int:
    """Number of descriptors on files below `folder`. Skips the test where the system does not tell."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc")
    return sum(_path(descriptor).startswith(f"{folder}{os.sep}") for descriptor in os.listdir("/proc/self/fd"))


def _path(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # that of the listing itself
        return ""
