"""The replay sees what it is there to see."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.planted.server_bugs import BUGS, one_iteration_more_is_admitted
from tests.train.serving import on_ranks
from tests.train.test_replay import TASKS, check
from tests.train.toys import Masked

TAG, LONGEST = 7, 20.0  # seconds


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("bug", [None, *BUGS], ids=lambda bug: bug.__name__ if bug else "none")
def test_a_planted_bug_of_servers_differs_from_the_replay(comm, bug, monkeypatch):
    if (part := on_ranks(comm, 2, 1)) is None:
        return
    how = {"task": "masked", "optimizer": "sgd", **(BUGS[bug] if bug else {})}
    task = TASKS[how.pop("task")]
    if bug is None:
        check(part, task, 2, 1, **how)
    else:
        bug(monkeypatch)
        with pytest.raises(AssertionError):
            check(part, task, 2, 1, **how)
    part.Free()


@dataclass
class Waiting(Masked):
    """Worker 1 stays in its first step until worker 0 is in its third; gives up after a while."""

    comm: Any = None
    step: int = -1

    def loss(self, outputs, targets):
        self.step += 1
        if self.comm.rank == 0 and self.step == 2:
            self.comm.Isend(np.empty(0), 1, TAG).Wait()
        if self.comm.rank == 1 and self.step == 0:
            until = time.perf_counter() + LONGEST
            while not self.comm.Iprobe(0, TAG) and time.perf_counter() < until:
                time.sleep(0.001)
            if self.comm.Iprobe(0, TAG):
                self.comm.Recv(np.empty(0), 0, TAG)
        return super().loss(outputs, targets)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("planted", (False, True))
def test_a_bound_that_is_one_too_large_is_seen(comm, planted, monkeypatch):
    """Worker 0 may be two iterations ahead with a bound of 2, and with a bound of 1 must not."""
    if (part := on_ranks(comm, 2, 1)) is None:
        return
    how = {"optimizer": "sgd", "evaluates": False}
    if planted:
        one_iteration_more_is_admitted(monkeypatch)
        with pytest.raises(AssertionError, match="a gap"):
            check(part, Waiting(comm=part), 2, 1, staleness=1, **how)
    else:
        _, (log,) = check(part, Waiting(comm=part), 2, 1, staleness=2, **how)
        assert max(event["gap"] for event in log if event["do"] == "pull") == 2
    part.Free()
