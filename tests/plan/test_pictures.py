"""Schedules as their papers draw them: stages down, time to the right, a backward twice as long as a forward."""

import pytest

from hpctrain.plan.program import forwards, program
from hpctrain.plan.schedule import Place
from hpctrain.plan.simulate import Times, simulate


def drawn(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def picture(*args, **options) -> list[list[str]]:
    return [line.split("|")[1].split() for line in simulate(*args, **options).picture().splitlines()]


PICTURES = {
    ("naive", 3, 2): """
        F0  .  .  .  .  .  . B0 B0 F1  .  .  .  .  .  . B1 B1
         . F0  .  .  . B0 B0  .  .  . F1  .  .  . B1 B1  .  .
         .  . F0 B0 B0  .  .  .  .  .  . F1 B1 B1  .  .  .  .
    """,
    ("f-then-b", 3, 4): """
        F0 F1 F2 F3  .  .  .  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
         . F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3  .  .
         .  . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3  .  .  .  .
    """,
    ("1f1b", 3, 4): """
        F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3
         . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3  .  .
         .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .  .  .
    """,
    ("zb-h1", 3, 4): """
        F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3
         . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
         .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """,
}


@pytest.mark.parametrize("name, stages, pieces", PICTURES)
def test_the_picture_of(name, stages, pieces):
    assert picture(name, stages, pieces) == drawn(PICTURES[name, stages, pieces])


def test_four_layers_on_three_devices_as_one_two_and_one():
    """The middle device takes twice as long, and the pipeline runs at its pace."""
    times = Times([1, 2, 1], [2, 4, 2], [1, 2, 1])
    expected = """
        F0 F1 F2  .  .  .  .  .  .  . B0 B0  .  .  .  . B1 B1  .  . B2 B2
         . F0 F0 F1 F1  . B0 B0 B0 B0 F2 F2 B1 B1 B1 B1 B2 B2 B2 B2
         .  .  . F0 B0 B0 F1 B1 B1  .  .  . F2 B2 B2
    """
    found = [line.split("|")[1].split() for line in simulate("1f1b", 3, 3, times).picture().splitlines()]
    assert [strip(line) for line in found] == [strip(line) for line in drawn(expected)]
    ideal = 3 * (2 + 4)
    assert simulate("naive", 3, 3, times).makespan == 3 * 12
    assert ideal < simulate("1f1b", 3, 3, times).makespan <= simulate("f-then-b", 3, 3, times).makespan


def strip(cells):
    while cells and cells[-1] == ".":
        cells = cells[:-1]
    return cells


def lists(name, stages, pieces, **options):
    return [" ".join(map(str, program(name, Place(s, stages, pieces, **options)))) for s in range(stages)]


def test_messages_and_updates_stand_where_they_belong():
    assert lists("1f1b", 2, 2) == [
        "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 REDUCE AGREE STEP",
        "RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1 REDUCE AGREE STEP",
    ]
    assert lists("1f1b", 1, 2) == ["F0 B0 F1 B1 REDUCE AGREE STEP"]
    assert lists("1f1b-async", 2, 1, num_updates=2) == [
        "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 REDUCE0 STEP0 RECV_B1 B1 REDUCE1 STEP1",
        "RECV_F0 F0 B0 SEND_B0 REDUCE0 STEP0 RECV_F1 F1 B1 SEND_B1 REDUCE1 STEP1",
    ]
    assert lists("2bw", 1, 2, num_updates=2) == ["F0 B0 F1 B1 REDUCE0 STEP0 F2 B2 F3 B3 REDUCE1 STEP1"]
    assert lists("1f1b-interleaved", 2, 2, num_chunks=2)[1].startswith(
        "RECV_F0 F0 SEND_F0 RECV_F1 F1 SEND_F1 RECV_F0.1 F0.1 B0.1"
    )


def test_tied_weights_are_summed_over_the_stages_once_they_are_summed_over_the_replicas():
    assert " ".join(map(str, program("1f1b", Place(0, 2, 1), tied=True)[-4:])) == "REDUCE TIE AGREE STEP"


def test_two_weight_versions_agree_on_the_norm_where_they_clip_and_one_a_micro_batch_never_does():
    assert " ".join(map(str, program("2bw", Place(0, 1, 2), clips=True))) == "F0 B0 F1 B1 REDUCE0 AGREE0 STEP0"
    assert " ".join(map(str, program("1f1b-async", Place(0, 1, 1), clips=True))) == "F0 B0 REDUCE0 STEP0"


def test_an_evaluation_is_forwards_alone():
    assert " ".join(map(str, forwards(Place(0, 2), 3))) == "F0 SEND_F0 F1 SEND_F1 F2 SEND_F2"
    last = forwards(Place(1, 2, num_chunks=2), 3)
    assert " ".join(map(str, last)) == (
        "RECV_F0 F0 SEND_F0 RECV_F1 F1 SEND_F1 RECV_F0.1 F0.1 RECV_F1.1 F1.1 RECV_F2 F2 SEND_F2 RECV_F2.1 F2.1"
    )
