"""A job in which nobody gets on ends, and says who is waited for; one in which somebody does goes on."""

import re
import threading

import pytest

from hpctrain.comm import watchdog
from hpctrain.comm.progress import Progress
from hpctrain.comm.watchdog import Report, Watchdog, culprit, table

LONG = 30.0  # seconds in which anything that is to happen has happened


class Rank:
    """One of a job, in this process; `ended` is set when its watchdog ends the job."""

    def __init__(self, rank, size, folder, waits_for=()):
        self.progress, self.ended = Progress(), threading.Event()
        self.watchdog = Watchdog(
            self.progress, 0.2, folder, rank, size, lambda doing: (str(doing), waits_for), self.ended.set
        )
        self.progress.begin(f"RECV_F{rank}")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "GATHER_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "PATIENCE", 0.5)


def test_where_nobody_gets_on_the_lowest_rank_tells_and_ends(tmp_path, quick, capsys):
    ranks = [Rank(rank, 3, tmp_path, [(rank + 1) % 3] if rank != 1 else []) for rank in range(3)]
    with ranks[0].watchdog, ranks[1].watchdog, ranks[2].watchdog:
        assert ranks[0].ended.wait(LONG)
    told = capsys.readouterr().err
    assert re.search("hpctrain: no progress: rank 0: for [01] s in RECV_F0, waits for rank 1\n", told)
    assert re.search("hpctrain: rank 2: for [01] s in RECV_F2, waits for rank 0\n", told)
    assert "hpctrain: likely culprit: rank 1\n" in told
    assert "most recent call first" in (tmp_path / "stall-0002.txt").read_text()


def test_a_rank_that_says_nothing_is_the_culprit(tmp_path, quick, capsys):
    ranks = [Rank(rank, 3, tmp_path, [2]) for rank in (0, 1)]
    with ranks[0].watchdog, ranks[1].watchdog:
        assert ranks[0].ended.wait(LONG)
    told = capsys.readouterr().err
    assert "rank 2: has written nothing; stopped or lost?" in told and "likely culprit: rank 2\n" in told


def test_where_the_lowest_rank_cannot_end_the_job_another_does(tmp_path, quick):
    ranks = [Rank(rank, 2, tmp_path, [1 - rank]) for rank in (0, 1)]
    ranks[0].watchdog._end = lambda: None
    with ranks[0].watchdog, ranks[1].watchdog:
        assert ranks[1].ended.wait(LONG)


def test_while_somebody_gets_on_nothing_ends(tmp_path, quick, capsys):
    """Rank 0 waits for many times the limit; rank 1 begins one thing after another."""
    waiting, busy = Rank(0, 2, tmp_path, [1]), Rank(1, 2, tmp_path)
    looks, over, decide = [0], threading.Event(), waiting.watchdog._decide

    def counted(waited):
        decide(waited)
        looks[0] += waited > 5 * 0.2
        if looks[0] == 3:
            over.set()

    waiting.watchdog._decide = counted
    with waiting.watchdog, busy.watchdog:
        while not over.wait(0.01):
            busy.progress.begin("F1")
        waiting.progress.begin("F0")
        while (tmp_path / "stall-0000.txt").exists():  # it takes back what it wrote
            waiting.progress.begin("F0")
            busy.progress.begin("F1")
    assert not waiting.ended.is_set() and not busy.ended.is_set()
    assert "stalled" not in capsys.readouterr().err


def test_one_that_is_to_wait_for_ever_leaves_it_to_others_to_begin(tmp_path, quick):
    serving, working = Rank(1, 2, tmp_path, [0]), Rank(0, 2, tmp_path)
    serving.watchdog._begins = False
    for _ in range(20):
        serving.watchdog._look(0.1)
    assert not list(tmp_path.iterdir())
    with serving.watchdog, working.watchdog:
        assert working.ended.wait(LONG)


def test_a_rank_whose_file_nobody_can_read_does_not_decide(tmp_path, quick):
    rank = Rank(0, 2, tmp_path / "not here", [1])
    for _ in range(5):
        rank.watchdog._look(0.1)
    rank.watchdog._decide(LONG)
    assert not rank.ended.is_set()


def test_a_process_that_was_stopped_itself_has_not_waited(tmp_path):
    rank = Rank(0, 1, tmp_path)
    rank.watchdog._look(0.0)
    for _ in range(3):
        rank.watchdog._look(2 * rank.watchdog._every)  # the most that a look counts, however long it was away
    assert rank.watchdog._told is not None
    patient = Rank(0, 1, tmp_path)
    patient.progress.begin("saving", is_patient=True)
    for _ in range(9):
        patient.watchdog._look(patient.watchdog._limit)
    assert patient.watchdog._told is None
    for _ in range(3):  # a host may be lost while it saves
        patient.watchdog._look(patient.watchdog._limit)
    assert patient.watchdog._told is not None


def test_a_limit_of_infinity_watches_nothing(tmp_path):
    rank = Watchdog(Progress(), float("inf"), tmp_path, 0, 1, lambda doing: ("", ()), lambda: None)
    with rank:
        assert not rank._thread.is_alive()


def test_the_culprit_is_silent_or_busy_or_waited_for_most():
    waiting = {0: Report(0, 9.0, "RECV_B1", [1]), 1: Report(1, 9.0, "RECV_B1", [2]), 2: Report(2, 9.0, "F1")}
    assert culprit(waiting, 3) == "rank 2"
    assert culprit(waiting, 5) == "ranks 3, 4"
    assert culprit({0: Report(0, 9.0, "x", [1]), 1: Report(1, 9.0, "x", [0, 2]), 2: Report(2, 9.0, "x", [1])}, 3) == (
        "rank 1"
    )
    assert table(list(waiting.values()), 3)[2] == "rank 1: for 9 s in RECV_B1, waits for rank 2"
