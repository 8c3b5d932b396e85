"""Traces by hand whose figures are known exactly, and dry runs whose bubble the simulation knows."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.simulate import Times, simulate
from hpctrain.report.trace import (
    Event,
    RankTrace,
    Trace,
    bubble_rate,
    chrome,
    hidden_share,
    lane_shares,
    length,
    overlap,
    read_trace,
    united,
)

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def computed(*spans, step=0):
    """Events of the compute lane from (name, start, end)."""
    return [Event("compute", name, start, end, step) for name, start, end in spans]


def pipeline(step=0, at=0.0, clocks=(0.0, 0.0), replica=0):
    """Two stages, the second slower: 2 + 4 and 4 + 8 seconds of computing in the 15 from first to last."""
    stages = (
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 9, 11), ("B1", 13, 15), ("STEP", 15, 20)],
        [("F0", 1, 3), ("B0", 3, 7), ("F1", 7, 9), ("B1", 9, 13), ("STEP", 15, 25)],
    )
    return [
        RankTrace(
            *(2 * replica + stage, stage, replica, clock, 1e-6),
            computed(*((name, at + start - clock, at + end - clock) for name, start, end in spans), step=step),
        )
        for stage, (spans, clock) in enumerate(zip(stages, clocks))
    ]


def joined(*runs):
    """The traces of one run, from those of its steps."""
    return [ranks[0]._replace(events=[event for rank in ranks for event in rank.events]) for ranks in zip(*runs)]


def gap(step, at, idle):
    """A step of both stages of `pipeline` that is idle for this share."""
    spans = computed(("F0", at, at + 1), ("B0", at + 1 / (1 - idle) - 1e-9, at + 1 / (1 - idle)), step=step)
    return [RankTrace(stage, stage, 0, 0.0, 0.0, spans) for stage in (0, 1)]


def simulated(name, stages, pieces, times=None, **options):
    timeline = simulate(name, stages, pieces, times, **options)
    traces = [
        RankTrace(
            stage, stage, 0, 0.0, 0.0, computed(*((str(s.action), s.start, s.end) for s in timeline.spans[stage]))
        )
        for stage in range(stages)
    ]
    return timeline, traces


def test_a_recorder_keeps_the_first_events_and_counts_the_others():
    trace = Trace(limit=2)
    for number in range(5):
        trace.add("compute", f"F{number}", number, number + 0.5, 7)
    assert trace.events == [("compute", "F0", 0, 0.5, 7), ("compute", "F1", 1, 1.5, 7)] and trace.dropped == 3


def test_chrome_has_a_process_a_rank_and_a_thread_a_lane():
    events = [
        ["waiting", "RECV_F3", 5.0, 5.25, 2],
        ["compute", "F3", 5.25, 5.5, 2],
        ["communication", "SEND_F3", 5.5, 6.0, 2],
        ["communication", "SEND_F4", 5.75, 6.5, 2],
        ["communication", "SEND_F5", 6.0, 6.25, 2],
    ]
    ranks = [
        RankTrace(0, 0, 0, 0.0, 0.0, [["compute", "F3", 105.0, 105.5, 2]]),
        RankTrace(3, 1, 1, 100.5, 2e-6, events),
    ]
    made = json.loads(json.dumps(chrome(ranks)))
    names = {
        (each["pid"], each.get("tid")): each["args"]["name"] for each in made["traceEvents"] if "name" in each["args"]
    }
    assert names == {
        (0, None): "rank 0: stage 0, replica 0",
        (0, 1): "compute",
        (3, None): "rank 3: stage 1, replica 1",
        (3, 1): "compute",
        (3, 2): "waiting",
        (3, 3): "communication",
        (3, 6): "communication 2",
    }
    spans = [each for each in made["traceEvents"] if each["ph"] == "X"]
    assert [(each["name"], each["pid"], each["tid"], each["ts"], each["dur"]) for each in spans] == [
        ("F3", 0, 1, 0.0, 500_000.0),
        ("RECV_F3", 3, 2, 500_000.0, 250_000.0),
        ("F3", 3, 1, 750_000.0, 250_000.0),
        ("SEND_F3", 3, 3, 1_000_000.0, 500_000.0),
        ("SEND_F4", 3, 6, 1_250_000.0, 750_000.0),
        ("SEND_F5", 3, 3, 1_500_000.0, 250_000.0),
    ]
    assert {each["args"]["step"] for each in spans} == {2}
    assert made["otherData"]["clock_error_microseconds"] == pytest.approx(2.0)


def test_read_trace_gives_back_what_was_written(tmp_path):
    wanted = [
        *pipeline(clocks=(0.0, 86_400.123_456_789)),
        RankTrace(2, 0, 1, -5.0, 3e-6, [Event("waiting", "AGREE", 3.0, 3.5, 1)], dropped=4),
        RankTrace(3, 1, 1, 0.0, 0.0, []),
    ]
    (tmp_path / "trace.json").write_text(json.dumps(chrome(wanted)))
    found = read_trace(tmp_path / "trace.json")
    assert [each._replace(events=[]) for each in found] == [each._replace(events=[]) for each in wanted]
    for mine, theirs in zip(found, wanted):
        assert [(e.lane, e.name, e.step) for e in mine.events] == [(e.lane, e.name, e.step) for e in theirs.events]
        for event, other in zip(mine.events, theirs.events):
            assert (event.start, event.end) == pytest.approx((other.start, other.end), abs=2e-9)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X"}], "otherData": {"ranks": []}}',
        b'{"traceEvents": 3, "otherData": {"ranks": []}}',
        b'{"traceEvents": [], "otherData": {"ranks": [{"rank": 0}]}}',
        json.dumps(chrome(pipeline())).replace('"compute"', '"cooking"').encode(),
        json.dumps(chrome(pipeline())).encode()[:-9],
    ],
)
def test_a_file_that_is_no_trace_is_told_in_one_line(tmp_path, content):
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"trace.json: no trace that hpctrain wrote") as told:
        read_trace(tmp_path / "trace.json")
    assert "\n" not in str(told.value)


def test_the_bubble_of_unequal_stages():
    assert bubble_rate(pipeline()) == pytest.approx(1 - 18 / (2 * 15))


@pytest.mark.parametrize("clocks", [(1000.0, -3.5), (0.0, 2.0)])
def test_clocks_that_differ_do_not_change_the_bubble(clocks):
    assert bubble_rate(pipeline(clocks=clocks)) == pytest.approx(1 - 18 / 30)
    misread = [trace._replace(offset=0.0) for trace in pipeline(clocks=clocks)]
    assert bubble_rate(misread) != pytest.approx(1 - 18 / 30)


def test_the_bubble_is_the_median_over_steps_and_replicas_without_the_first_step():
    steps = [gap(0, 0.0, 0.9), gap(1, 100.0, 0.2), gap(2, 200.0, 0.4), gap(3, 300.0, 0.3)]
    assert bubble_rate(joined(*steps)) == pytest.approx(0.3)
    assert bubble_rate(joined(*steps[:2])) == pytest.approx((0.9 + 0.2) / 2)
    assert bubble_rate(joined(*steps), steps=(0, 3, 77)) == pytest.approx((0.9 + 0.3) / 2)
    other = [trace._replace(rank=trace.rank + 2, replica=1) for trace in joined(*steps[1:3])]
    assert bubble_rate([*joined(*steps[1:3]), *other]) == pytest.approx((0.2 + 0.4) / 2)


def test_each_replica_is_a_pipeline_of_its_own():
    late = pipeline(at=500.0, replica=1)
    assert bubble_rate([*pipeline(), *late]) == pytest.approx(1 - 18 / 30)


def test_a_step_that_some_stage_did_not_record_whole_does_not_count():
    first, second = joined(gap(0, 0.0, 0.2), gap(1, 100.0, 0.6))
    assert bubble_rate([first, second]) == pytest.approx(0.4)
    assert bubble_rate([first, second._replace(dropped=1)]) == pytest.approx(0.2)
    assert bubble_rate([first, second._replace(events=second.events[:2])]) == pytest.approx(0.2)
    assert bubble_rate([first, second._replace(events=[])]) is None
    assert bubble_rate([]) is None


@pytest.mark.parametrize("name", ["naive", "f-then-b", "1f1b", "zb-h1", "1f1b-async"])
def test_the_bubble_of_a_dry_run_is_that_of_its_simulation(name, tmp_path):
    options = {"num_updates": 3} if name == "1f1b-async" else {}
    times = Times([1.0, 2.5, 1.5], [2.0, 4.0, 3.5], [1.0, 2.0, 1.5], 0.1)
    timeline, traces = simulated(name, 3, 5, times, **options)
    (tmp_path / "t").write_text(json.dumps(chrome(traces)))
    assert bubble_rate(read_trace(tmp_path / "t")) == pytest.approx(timeline.bubble_rate)


def test_chunks_count_as_well():
    timeline, traces = simulated("1f1b-interleaved", 2, 4, num_chunks=2)
    assert any(event.name == "F3.1" for event in traces[0].events)
    assert bubble_rate(traces) == pytest.approx(timeline.bubble_rate)


def test_the_hidden_share_counts_each_moment_once():
    events = [
        *computed(("F0", 0, 4), ("STEP", 6, 7)),
        Event("communication", "SEND_F0", 3, 6, 0),  # one second under F0, two open
        Event("communication", "gradients 0", 3.5, 6.5, 0),  # half a second more, under STEP
        Event("waiting", "REDUCE", 4, 6, 0),
    ]
    trace = RankTrace(0, 0, 0, 0.0, 0.0, events)
    assert hidden_share([trace]) == pytest.approx(1.5 / 3.5)
    other = RankTrace(1, 0, 1, 9.0, 0.0, [*computed(("F0", 0, 10)), Event("communication", "SEND_F0", 0, 3.5, 0)])
    assert hidden_share([trace, other]) == pytest.approx(5 / 7)
    assert hidden_share(pipeline()) is None and hidden_share([]) is None


def test_lane_shares_add_up_to_the_whole_time():
    events = [
        *computed(("F0", 0, 4), ("B0", 6, 8)),
        Event("waiting", "RECV_B0", 4, 6, 0),
        Event("waiting", "AGREE", 7.5, 9, 0),
        Event("communication", "SEND_F0", 9, 10, 0),
    ]
    shares = lane_shares([RankTrace(0, 0, 0, 5.0, 0.0, events), RankTrace(1, 1, 0, 0.0, 0.0, [])])
    assert shares == [pytest.approx({"compute": 0.6, "waiting": 0.3, "rest": 0.1}), None]


@given(SPANS, SPANS)
def test_unions_and_overlaps_are_those_of_counting_the_moments(first, second):
    moments = [{moment for start, end in spans for moment in range(start, end)} for spans in (first, second)]
    assert [length(united(spans)) for spans in (first, second)] == [len(each) for each in moments]
    assert overlap(united(first), united(second)) == len(moments[0] & moments[1])
    merged = united(first)
    assert all(before[1] < after[0] for before, after in zip(merged, merged[1:]))


def test_a_trace_needs_neither_torch_nor_mpi_nor_matplotlib():
    program = """
import sys
from hpctrain.report import figures, page, trace
print(*({"torch", "mpi4py", "numpy", "matplotlib"} & sys.modules.keys()))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == []
