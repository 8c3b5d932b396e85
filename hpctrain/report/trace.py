"""Where the time of each rank goes: the spans that it records, all ranks in one file, and what they come to.

Perfetto and chrome://tracing open the file. Each rank has a clock of its own; its `offset` added gives that of rank 0.
"""

import heapq
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

LANES = ("compute", "waiting", "communication")
PASS = re.compile(r"([FBW])(\d+(?:\.\d+)?)")  # the computation of a micro-batch, such as F3 or F3.1
NANOSECONDS, MICROSECOND = 1e9, 1e-6

Interval = tuple[float, float]


class Event(NamedTuple):
    """A span on one rank, in seconds on its own clock. `lane` is one of LANES."""

    lane: str
    name: str
    start: float
    end: float
    step: int


class Trace:
    """What one rank records: the first `limit` events; those beyond are counted in `dropped`."""

    def __init__(self, limit: int = 200_000):
        self.events: list[Event] = []
        self.dropped = 0
        self._limit = limit

    def add(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        if len(self.events) < self._limit:
            self.events.append(Event(lane, name, start, end, step))
        else:
            self.dropped += 1


class RankTrace(NamedTuple):
    """One rank's events, each an Event or a list of its fields; `offset` and `error` in seconds."""

    rank: int
    stage: int
    replica: int
    offset: float
    error: float
    events: list
    dropped: int = 0

    def aligned(self) -> list[Event]:
        """The events on the clock of rank 0."""
        return [
            Event(lane, name, start + self.offset, end + self.offset, step)
            for lane, name, start, end, step in self.events
        ]


def chrome(traces: list[RankTrace]) -> dict[str, Any]:
    """A JSON object of the trace event format: a process a rank, a thread a lane, microseconds from the first event.

    A thread holds no spans that overlap, so a lane has as many threads as it has spans under way at a time.
    """
    aligned = [trace.aligned() for trace in traces]
    origin = min((event.start for events in aligned for event in events), default=0.0)
    ranks = [{key: value for key, value in trace._asdict().items() if key != "events"} for trace in traces]
    error = max((trace.error for trace in traces), default=0.0)
    return {
        "traceEvents": [
            each for trace, events in zip(traces, aligned) for each in (*_named(trace), *_spans(trace, events, origin))
        ],
        "displayTimeUnit": "ms",
        "otherData": {"clock_error_microseconds": error / MICROSECOND, "origin_seconds": origin, "ranks": ranks},
    }


def _named(trace: RankTrace) -> Iterable[dict[str, Any]]:
    name = f"rank {trace.rank}: stage {trace.stage}, replica {trace.replica}"
    yield {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}}


def _spans(trace: RankTrace, events: list[Event], origin: float) -> Iterable[dict[str, Any]]:
    threads = _threads(events)
    for thread in sorted(set(threads)):
        row, lane = divmod(thread - 1, len(LANES))
        name = LANES[lane] + (f" {row + 1}" if row else "")
        place = {"ph": "M", "pid": trace.rank, "tid": thread}
        yield {**place, "name": "thread_name", "args": {"name": name}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for thread, event in zip(threads, events):
        start, end = (round((moment - origin) * NANOSECONDS) for moment in (event.start, event.end))
        what = {"ph": "X", "name": event.name, "cat": event.lane, "args": {"step": event.step}}
        yield {**what, "pid": trace.rank, "tid": thread, "ts": start / 1000, "dur": (end - start) / 1000}


def _threads(events: list[Event]) -> list[int]:
    """For each event a thread, from 1: the lane's first one that is free."""
    threads = [0] * len(events)
    free: dict[str, list[int]] = defaultdict(list)
    busy: dict[str, list[tuple[float, int]]] = defaultdict(list)  # (end, row)
    for place in sorted(range(len(events)), key=lambda place: events[place].start):
        lane, _, start, end, _ = events[place]
        while busy[lane] and busy[lane][0][0] <= start:
            heapq.heappush(free[lane], heapq.heappop(busy[lane])[1])
        row = heapq.heappop(free[lane]) if free[lane] else len(busy[lane])
        heapq.heappush(busy[lane], (end, row))
        threads[place] = 1 + LANES.index(lane) + len(LANES) * row
    return threads


def read_trace(path: str | Path) -> list[RankTrace]:
    """What `chrome` was given, times to a nanosecond. ValueError, one line, where the file is no such trace."""
    try:
        data = json.loads(Path(path).read_bytes())
        return _traces(data["traceEvents"], data["otherData"])
    except KeyError as error:
        raise ValueError(f"{path}: no trace that hpctrain wrote, {error} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: no trace that hpctrain wrote ({error})") from None


def _traces(events: list[dict], other: dict[str, Any]) -> list[RankTrace]:
    traces = {each["rank"]: RankTrace(**each, events=[]) for each in other["ranks"]}
    for each in events:
        if each["ph"] != "X":
            continue
        trace = traces[each["pid"]]
        if each["cat"] not in LANES:
            raise ValueError(f"no lane is called {each['cat']!r}")
        start = other["origin_seconds"] + each["ts"] * MICROSECOND - trace.offset
        end = start + each["dur"] * MICROSECOND
        trace.events.append(Event(each["cat"], str(each["name"]), start, end, int(each["args"]["step"])))
    return list(traces.values())


def bubble_rate(traces: list[RankTrace], steps: Collection[int] | None = None) -> float | None:
    """Idle share of the stages between the first and the last computation of a micro-batch of a step.

    The median over replicas and steps: those in `steps`, else all but the first where there are more than two. None
    where no step is whole on all stages.
    """
    rates = []
    for replica in {trace.replica for trace in traces}:
        stages = [_passes(trace) for trace in traces if trace.replica == replica]
        whole = sorted(set.intersection(*map(set, stages)))
        if steps is not None:
            chosen = [step for step in whole if step in steps]
        else:
            chosen = whole[1:] if len(whole) > 2 else whole
        rates += [_idle([stage[step] for stage in stages]) for step in chosen]
    return statistics.median(rates) if rates else None


def _passes(trace: RankTrace) -> dict[int, list[Interval]]:
    """When micro-batches were computed, by step; without the step in which a trace broke off."""
    found: dict[int, list[Interval]] = defaultdict(list)
    for lane, name, start, end, step in trace.aligned():
        if lane == "compute" and PASS.fullmatch(name):
            found[step].append((start, end))
    if trace.dropped and found:
        del found[max(found)]
    return found


def _idle(stages: list[list[Interval]]) -> float:
    spans = [span for stage in stages for span in stage]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1 - sum(end - start for start, end in spans) / (len(stages) * whole) if whole else 0.0


def hidden_share(traces: list[RankTrace]) -> float | None:
    """Share of the time in which something travels from a rank that this rank also computes; None of no time."""
    total = hidden = 0.0
    for trace in traces:
        travelling, computing = _lane(trace, "communication"), _lane(trace, "compute")
        total += length(travelling)
        hidden += overlap(travelling, computing)
    return hidden / total if total else None


def lane_shares(traces: list[RankTrace]) -> list[dict[str, float] | None]:
    """For each trace the shares `compute`, `waiting` and `rest` of the time from its first event to its last one.

    None for a trace without events.
    """
    return [_shares(trace) if trace.events else None for trace in traces]


def _shares(trace: RankTrace) -> dict[str, float]:
    _, _, starts, ends, _ = zip(*trace.events)
    whole = max(ends) - min(starts) or 1.0
    compute = length(_lane(trace, "compute")) / whole
    either = length(_lane(trace, "compute", "waiting")) / whole
    return {"compute": compute, "waiting": either - compute, "rest": 1 - either}


def _lane(trace: RankTrace, *lanes: str) -> list[Interval]:
    return united((start, end) for lane, _, start, end, _ in trace.events if lane in lanes)


def united(spans: Iterable[Interval]) -> list[Interval]:
    """The same points in time, as intervals that are in order and do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: list[Interval]) -> float:
    """Of united intervals."""
    return sum(end - start for start, end in spans)


def overlap(first: list[Interval], second: list[Interval]) -> float:
    """How long both last, each a list of united intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(0.0, end - start)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
