"""The check of the first law sees what it is there to see."""

import pytest

from hpctrain.train.errors import AgreedError
from tests.planted.train_bugs import BUGS
from tests.train.test_equivalence import TASKS, assert_equal_to_reference, reference, settings
from tests.train.toys import run


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_turns_equivalence_red(comm, bug, monkeypatch):
    task, optimizer, rows = "unused", "adamw", 12
    reference(task, optimizer, rows)
    bug(monkeypatch)
    with pytest.raises((AssertionError, AgreedError)):
        losses, weights, _ = run(TASKS[task], comm, num_microbatches=2, **settings(optimizer, rows))
        assert_equal_to_reference(losses, weights, task, optimizer, rows)
