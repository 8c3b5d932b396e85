"""How a process comes to its ranks, where that takes too long."""

import time

import pytest

from hpctrain.comm import environment
from hpctrain.comm.start import within
from tests.harness.launch import run_python


def test_what_ends_in_time_ends_nothing():
    with within(0.01, "not in time"):
        pass
    with within(None, "not in time"):
        time.sleep(0.02)


def test_a_rank_that_others_never_join_ends_with_a_line():
    program = "import time\nfrom hpctrain.comm.start import within\nwith within(0.01, 'not in time'): time.sleep(100)"
    result = run_python("-c", program, timeout=60)
    assert result.returncode == 77 and result.stderr == "hpctrain: not in time\n", result


@pytest.mark.parametrize("value, expected", [("1", True), ("true", True), ("0", False), (None, False)])
def test_who_may_be_lost_is_told_by_open_mpi(value, expected):
    environ = {} if value is None else {environment.MITIGATION: value}
    assert environment.is_mitigating(environ) is expected
