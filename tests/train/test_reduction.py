"""What is told of the sums of gradients."""

import pytest

from hpctrain.train.reduction import Times


def test_the_hidden_share_is_what_passed_before_the_rank_waited():
    times = Times()
    for began, seconds, waited_from in ((10.0, 2.0, 11.5), (20.0, 1.0, 19.0), (30.0, 1.0, 33.0)):
        times.note(began, seconds, waited_from)  # 1.5 of 2 seconds, nothing, all of one
    figures = times.figures(1000, 1.5)
    assert figures == {"bytes": 1000, "seconds": 1.0, "bus_bandwidth": 1500.0, "hidden_share": pytest.approx(2.5 / 4)}


def test_what_comes_behind_is_never_hidden():
    times = Times()
    times.note(10.0, 1.0, 11.5, behind=0.5)
    assert times.figures(1000, 1.0)["hidden_share"] == pytest.approx(1 / 1.5)


def test_one_rank_alone_has_no_bandwidth():
    times = Times()
    times.note(1.0, 0.5, 1.2)
    assert times.figures(1000, 0.0) == {"bytes": 1000, "seconds": 0.5, "bus_bandwidth": None, "hidden_share": None}
    assert Times().figures(8, 1.0)["seconds"] == 0.0
