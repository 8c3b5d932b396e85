"""Every schedule run dry, over whole ranges: it ends, with the order, bubble, memory and versions that it claims."""

import pytest

from hpctrain.plan import formulas
from hpctrain.plan.program import program
from hpctrain.plan.schedule import SCHEDULES, Op, Place
from hpctrain.plan.simulate import Deadlock, Times, run, simulate

STAGES, PIECES = range(1, 7), range(1, 11)
SYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if schedule.flushes]


def layouts(name):
    """(stages, micro-batches, options) that the schedule takes."""
    for stages in STAGES:
        for pieces in PIECES:
            if SCHEDULES[name].has_chunks:
                yield from (
                    (stages, pieces, {"num_chunks": chunks}) for chunks in (2, 3) if pieces % stages == 0 and stages > 1
                )
            elif SCHEDULES[name].flushes:
                yield stages, pieces, {}
            elif name != "2bw" or pieces >= stages:
                yield from ((stages, pieces, {"num_updates": updates}) for updates in (1, 2, 5))


def compact(name, place):
    return " ".join(map(str, program(name, place)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_layout_ends_and_computes_each_micro_batch_once_in_ascending_order(name):
    for stages, pieces, options in layouts(name):
        timeline = simulate(name, stages, pieces, **options)
        total, chunks = pieces * options.get("num_updates", 1), options.get("num_chunks", 1)
        ops = (Op.F, Op.B, Op.W) if SCHEDULES[name].splits_backward else (Op.F, Op.B)
        for spans in timeline.spans:
            for op in ops:
                for chunk in range(chunks):
                    done = [s.action.microbatch for s in spans if s.action.op is op and s.action.chunk == chunk]
                    assert done == list(range(total)), (name, stages, pieces, options)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_bubble_is_that_of_the_formula(name):
    """Where there are at least as many micro-batches as stages; with fewer zb-h1 has nothing to fill its gaps with."""
    for stages, pieces, options in layouts(name):
        if pieces >= stages or name != "zb-h1":
            place = Place(0, stages, pieces, **options)
            found = simulate(name, stages, pieces, **options).bubble_rate
            assert found == pytest.approx(formulas.bubble_rate(name, place)), (stages, pieces, options)


@pytest.mark.parametrize("name", ["1f1b-async", "2bw"])
def test_without_a_flush_the_bubble_goes_to_nothing(name):
    rates = [simulate(name, 4, 4, num_updates=updates).bubble_rate for updates in (1, 10, 100)]
    assert rates[0] > 10 * rates[2] and rates[0] > rates[1] > rates[2] and rates[2] < 0.01


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1f1b-interleaved"])
def test_the_peak_in_flight_is_that_of_the_formula(name):
    for stages, pieces, options in layouts(name):
        timeline = simulate(name, stages, pieces, **options)
        places = [Place(stage, stages, pieces, **options) for stage in range(stages)]
        assert timeline.peak_in_flight == [formulas.peak_in_flight(name, place) for place in places]


def test_1f1b_holds_no_more_with_more_micro_batches_and_interleaving_holds_more():
    few, many = (simulate("1f1b", 4, pieces).peak_in_flight for pieces in (8, 64))
    assert few == many == [4, 3, 2, 1]
    assert simulate("f-then-b", 4, 64).peak_in_flight == [64] * 4
    assert simulate("1f1b-interleaved", 4, 64, num_chunks=2).peak_in_flight[0] > 4


def test_zb_h1_holds_as_many_on_every_stage_until_their_weight_gradients():
    for stages in STAGES:
        for pieces in PIECES:
            timeline = simulate("zb-h1", stages, pieces)
            assert all(peak <= min(pieces, stages) for peak in timeline.peak_until_weights)
            if pieces >= stages:
                assert timeline.peak_until_weights == [stages] * stages


@pytest.mark.parametrize("stages", STAGES)
def test_1f1b_async_uses_the_newest_weights_that_a_stage_has(stages):
    timeline = simulate("1f1b-async", stages, 1, num_updates=20)
    for stage in range(stages):
        place = Place(stage, stages, 1, 20)
        used = [timeline.versions[stage][microbatch] for microbatch in range(20)]
        assert used == [formulas.version_used("1f1b-async", place, microbatch) for microbatch in range(20)]
        lag = {timeline.updates[stage][k] - used[k] for k in range(stages, 20)}
        assert lag == {formulas.delay("1f1b-async", place)} == {stages - 1 - stage}
        assert formulas.weight_versions("1f1b-async", place) == stages - stage


@pytest.mark.parametrize("stages", STAGES)
def test_the_version_that_2bw_uses_has_been_made_and_only_the_newest_is_newer(stages):
    """So two versions are enough, on every stage."""
    for pieces in (stages, stages + 1, 2 * stages + 1):
        timeline = simulate("2bw", stages, pieces, num_updates=4)
        for stage in range(stages):
            place = Place(stage, stages, pieces, 4)
            for microbatch in range(4 * pieces):
                used, newest = formulas.version_used("2bw", place, microbatch), timeline.versions[stage][microbatch]
                assert newest - 1 <= used <= newest
                if microbatch >= pieces:
                    assert timeline.updates[stage][microbatch] - used == formulas.delay("2bw", place) == 1


def test_a_link_costs_f_then_b_two_crossings_and_1f1b_a_round_trip_each_time():
    """So the warm-up is a parameter: twice as long hides the link, for 15 in flight instead of 8 (or of 32)."""
    slow = Times.alike(8, forward=1, backward=2, link=1)
    f_then_b, textbook = (simulate(name, 8, 32, slow) for name in ("f-then-b", "1f1b"))
    doubled = simulate("1f1b", 8, 32, slow, warmup=2)
    assert (f_then_b.makespan, textbook.makespan, doubled.makespan) == (131, 185, 131)
    assert (f_then_b.peak_in_flight[0], textbook.peak_in_flight[0], doubled.peak_in_flight[0]) == (32, 8, 15)
    assert f_then_b.makespan == simulate("f-then-b", 8, 32).makespan + 2 * 7


def test_a_slow_stage_is_seen_by_the_simulation_only():
    even = simulate("1f1b", 4, 8)
    uneven = simulate("1f1b", 4, 8, Times([1, 2, 1, 1], [2, 4, 2, 2], [1, 2, 1, 1]))
    assert uneven.bubble_rate > even.bubble_rate == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", ["1f1b", "1f1b-async"])
def test_sends_that_block_stop_most_grids(name):
    stopped = 0
    for stages in range(2, 7):
        for pieces in range(2, 11):
            try:
                simulate(name, stages, pieces, blocking_sends=True)
            except Deadlock as error:
                assert "nobody can go on: stage 0 for" in str(error)
                stopped += 1
    assert stopped > 30


def test_a_list_that_waits_for_what_never_comes_is_told():
    first, second = (program("1f1b", Place(stage, 2, 2)) for stage in range(2))
    second = [action for action in second if action.op is not Op.SEND_B]
    with pytest.raises(Deadlock, match="nobody can go on: stage 0 for RECV_B0"):
        run([first, second], Times.alike(2), False)


@pytest.mark.parametrize(
    "name, place, line",
    [
        (
            "1f1b-interleaved",
            Place(0, 2, 4),
            "--schedule 1f1b-interleaved: needs --chunks 2 or more, with 1 it is 1f1b",
        ),
        (
            "1f1b-interleaved",
            Place(0, 1, 4, num_chunks=2),
            "--schedule 1f1b-interleaved: needs --stages 2 or more, there is nothing to interleave with 1",
        ),
        ("1f1b", Place(0, 2, 4, num_chunks=2), "--chunks 2: --schedule 1f1b has one chunk of layers a stage"),
        (
            "1f1b-interleaved",
            Place(0, 4, 6, num_chunks=2),
            "--num-microbatches 6: --schedule 1f1b-interleaved takes multiples of --stages, such as 4 or 8",
        ),
        ("2bw", Place(0, 4, 3), "--num-microbatches 3: --schedule 2bw takes 4 or more, one a stage"),
    ],
)
def test_numbers_that_a_schedule_cannot_have_are_refused(name, place, line):
    with pytest.raises(ValueError) as caught:
        program(name, place)
    assert str(caught.value) == line
