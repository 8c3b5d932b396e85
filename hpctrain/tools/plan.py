"""`hpctrain plan`: what schedules cost, by formula and by a dry run, before anything runs.

All times are in one unit, whichever; unless told otherwise a forward of a stage takes 1. Torch is not needed.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

from hpctrain.config import Parser, UsageError
from hpctrain.config.values import check_value, describe
from hpctrain.plan import formulas
from hpctrain.plan.program import check
from hpctrain.plan.schedule import SCHEDULES, Place
from hpctrain.plan.simulate import Timeline, Times, simulate
from hpctrain.report.summary import counted
from hpctrain.tools.alone import on_rank_0

WARMED = ("1f1b", "zb-h1")  # whose warm-up may be longer or shorter
UPDATES = 10  # of a schedule without a flush, where none are asked for
LONGEST = 100_000  # forwards on all stages together that a dry run takes: seconds
WIDEST = 200  # columns of a picture, and of what is not for a terminal


class Numbers(NamedTuple):
    """What a dry run takes; `slow`: what the times of some stages are multiplied by."""

    stages: int
    num_microbatches: int
    chunks: int
    forward: float
    backward: float
    weights: float
    link: float
    warmup: float
    updates: int
    slow: dict[int, float]

    def place(self, name: str) -> Place:
        """Of stage 0; what a schedule does not know is left out."""
        schedule = SCHEDULES[name]
        updates, chunks = 1 if schedule.flushes else self.updates, self.chunks if schedule.has_chunks else 1
        return Place(0, self.stages, self.num_microbatches, updates, chunks, self.warmup if name in WARMED else 1.0)

    def times(self) -> Times:
        factors = [self.slow.get(stage, 1.0) for stage in range(self.stages)]
        of_stages = ([time * factor for factor in factors] for time in (self.forward, self.backward, self.weights))
        return Times(*of_stages, self.link)


def run(argv: list[str], world) -> int:
    """Prints on rank 0. Returns 0, or 2 with one line for what cannot be. Collective."""
    return on_rank_0(world, lambda: _plan(argv, world is not None))


def parser() -> Parser:
    top = Parser("hpctrain plan", add_help=False, allow_abbrev=False)
    count, time = _number(int, minimum=1), _number(float, above=0)
    top.add_argument("--stages", type=count, default=4, metavar="S", help="stages of the pipeline (4)")
    top.add_argument("--num-microbatches", type=count, default=8, metavar="M", help="of an update (8)")
    top.add_argument("--schedule", choices=SCHEDULES, help="one of them, with a picture; default: all")
    top.add_argument("--chunks", type=count, metavar="V", help="groups of layers a stage, of 1f1b-interleaved (2)")
    top.add_argument("--forward", type=time, default=1.0, metavar="F", help="a micro-batch's on one stage (1)")
    top.add_argument("--backward", type=time, default=2.0, metavar="B", help="the whole backward (2)")
    top.add_argument("--weights", type=_number(float, minimum=0), metavar="W", help="its part for weights (half)")
    top.add_argument("--link", type=_number(float, minimum=0), default=0.0, metavar="L", help="time of a message (0)")
    top.add_argument("--warmup", type=_number(float, minimum=0), default=1.0, metavar="X", help="of 1f1b, zb-h1 (1)")
    top.add_argument("--slow", type=_slow, default=[], action="append", metavar="STAGE:FACTOR", help="a slower stage")
    top.add_argument("--updates", type=count, metavar="U", help=f"one after another, without a flush ({UPDATES})")
    return top


def _number(kind: type, **rules) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
            check_value("", value, kind, rules)
        except ValueError:
            raise ArgumentTypeError(f"expected {describe(kind, rules)}, got {text!r}") from None
        return value

    return read


def _slow(text: str) -> tuple[int, float]:
    stage, _, factor = text.partition(":")
    try:
        return _number(int, minimum=0)(stage), _number(float, above=0)(factor)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"expected STAGE:FACTOR, such as 2:1.5, got {text!r}") from None


def _plan(argv: list[str], launched: bool) -> str | None:
    """What is wrong, if anything."""
    try:
        asked = parser().parse(argv)
        name, numbers = asked["schedule"], read_numbers(asked)
        if name is not None:
            _check_belongs(name, asked, numbers)
    except ValueError as error:
        return str(error)
    rows, left_out = {}, []
    for each in [name] if name else SCHEDULES:
        try:
            rows[each] = row(numbers, each)
        except ValueError as error:
            left_out.append(f"without {each}: {error}")
    print(_heading(numbers))
    _print_table(rows.values(), numbers, launched)
    print(*left_out, *_notes(numbers, rows), *(draw(numbers, name) if name else ()), sep="\n")
    return None


def read_numbers(asked: dict[str, Any]) -> Numbers:
    """What the command line says. UsageError for numbers that do not go together."""
    stages, pieces, backward, slow = asked["stages"], asked["num_microbatches"], asked["backward"], dict(asked["slow"])
    weights = backward / 2 if asked["weights"] is None else asked["weights"]
    if weights > backward:
        raise UsageError(f"--weights {weights:g}: is a part of --backward, at most {backward:g}")
    if far := [stage for stage in slow if stage >= stages]:
        raise UsageError(f"--slow {far[0]}:{slow[far[0]]:g}: with --stages {stages} there are 0 to {stages - 1}")
    if pieces * (depth := stages * max(asked["updates"] or 1, asked["chunks"] or 2)) > LONGEST:
        raise UsageError(f"--num-microbatches {pieces}: at most {LONGEST // depth} with so many stages and updates")
    most = 1 if asked["schedule"] and SCHEDULES[asked["schedule"]].flushes else LONGEST // (stages * pieces)
    updates = asked["updates"] or min(UPDATES, most)
    values = {**asked, "weights": weights, "slow": slow, "chunks": asked["chunks"] or 2, "updates": updates}
    return Numbers(**{key: values[key] for key in Numbers._fields})


def _check_belongs(name: str, asked: dict[str, Any], numbers: Numbers) -> None:
    """ValueError for a schedule that does not fit, and for a flag that it does not have."""
    check(name, numbers.place(name)._replace(num_chunks=asked["chunks"] or numbers.place(name).num_chunks))
    if asked["warmup"] != 1 and name not in WARMED:
        raise UsageError(f"--warmup {asked['warmup']:g}: belongs to --schedule {' or '.join(WARMED)}, not to {name}")
    if asked["updates"] is not None and SCHEDULES[name].flushes:
        raise UsageError(f"--updates {asked['updates']}: belongs to --schedule 1f1b-async or 2bw, not to {name}")


def row(numbers: Numbers, name: str) -> tuple[str, ...]:
    """The cells of a schedule's row. ValueError where it does not fit."""
    timeline, place = dry_run(numbers, name), numbers.place(name)
    formula = max(0.0, formulas.bubble_rate(name, place, numbers.forward, numbers.backward, numbers.weights))
    bubbles = (f"{100 * rate:.1f} %" for rate in (formula, timeline.bubble_rate))
    makespan = f"{timeline.makespan / place.num_updates / numbers.forward:.6g}"
    held = [(timeline.peak_in_flight[stage], timeline.peak_until_weights[stage]) for stage in (0, -1)]
    peaks = (f"{peak}" if peak == until else f"{peak} ({until})" for peak, until in held)
    return name, *bubbles, makespan, *peaks, str(formulas.weight_versions(name, place)), SCHEDULES[name].summary


def dry_run(numbers: Numbers, name: str) -> Timeline:
    _, stages, pieces, updates, chunks, warmup = numbers.place(name)
    return simulate(name, stages, pieces, numbers.times(), num_updates=updates, num_chunks=chunks, warmup=warmup)


def _heading(numbers: Numbers) -> str:
    times = f"a forward takes {numbers.forward:g}, a backward {numbers.backward:g}, a message {numbers.link:g}"
    slow = [f"stage {stage} {factor:g} times as long" for stage, factor in sorted(numbers.slow.items())]
    return ", ".join([counted(numbers.stages, "stage"), f"{numbers.num_microbatches} micro-batches; {times}", *slow])


def _notes(numbers: Numbers, names: Iterable[str]) -> Iterator[str]:
    """What the columns mean, as far as these rows need it."""
    of_many = not all(SCHEDULES[name].flushes for name in names)
    mean = f"; without a flush the mean of {counted(numbers.updates, 'update')}" if of_many else ""
    yield f"makespan: of an update, in forwards of a stage{mean}"
    if numbers.slow or numbers.link:
        yield "bubble by formula: of stages that take the same time, and messages that take none"
    if any(SCHEDULES[name].has_chunks for name in names):
        yield f"in flight with chunks: each is 1/{numbers.chunks} of a stage's layers"
    if any(SCHEDULES[name].splits_backward for name in names):
        yield f"(in brackets): until the gradients of weights, {numbers.weights:g} of a backward's {numbers.backward:g}"


def _print_table(rows: Iterable[tuple[str, ...]], numbers: Numbers, launched: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    plain = {"force_terminal": False, "width": WIDEST} if launched or not sys.stdout.isatty() else {}
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False, **plain)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nschedule", style="bold", no_wrap=True)
    peaks = ("in flight\nstage 0", f"in flight\nstage {numbers.stages - 1}")
    for name in ("bubble by\nformula", "bubble\nsimulated", "\nmakespan", *peaks, "weight\nversions"):
        table.add_column(name, justify="right", no_wrap=True)
    if console.width >= 132:  # else there is no room for words
        table.add_column("", no_wrap=True)
    for cells in rows:
        table.add_row(*cells[: len(table.columns)])
    console.print(table)


def draw(numbers: Numbers, name: str) -> list[str]:
    """The picture's lines; where it would be too wide, that of smaller numbers under a line that says which."""
    if (text := picture(numbers, name)) is not None:
        return ["", *text.splitlines()]
    said = f"\ntoo wide for a picture of {WIDEST} columns; "
    for fewer, text in filter(None, (_largest(name, series) for series in _smaller(numbers))):
        changed = [f"--{key} {new}" for key, new, old in zip(Numbers._fields, fewer, numbers) if new != old]
        return [f"{said}this one is with {' '.join(changed).replace('_', '-')}:", *text.splitlines()]
    return [f"{said}rounder times would do, such as --forward 1 --backward 2"]


def picture(numbers: Numbers, name: str) -> str | None:
    """None where it would be wider than WIDEST. ValueError where the schedule does not fit."""
    if 2 * numbers.num_microbatches * numbers.place(name).num_updates > WIDEST:
        return None
    timeline = dry_run(numbers, name)
    unit = _unit(timeline, numbers.forward)
    width = 1 + max(len(str(span.action)) for spans in timeline.spans for span in spans)
    if len(f"stage {numbers.stages - 1} |") + width * round(timeline.makespan / unit) > WIDEST:
        return None
    return timeline.picture(unit)


def _unit(timeline: Timeline, forward: float) -> float:
    """The longest time of which every start and end is a multiple."""
    times = {at / forward for spans in timeline.spans for span in spans for at in span[1:]}
    parts = [Fraction(at).limit_denominator(1000) for at in times]
    whole = math.lcm(*(part.denominator for part in parts))
    return forward * math.gcd(*(int(part * whole) for part in parts)) / whole


def _smaller(numbers: Numbers) -> Iterator[Iterable[Numbers]]:
    """Series of numbers that grow; the first series are nearest to what was asked for."""
    yield (numbers._replace(updates=updates) for updates in range(1, numbers.updates))
    for stages in range(min(numbers.stages, WIDEST // 3), 0, -1):
        fewer = numbers._replace(stages=stages, updates=1)
        yield (fewer._replace(num_microbatches=pieces) for pieces in range(1, numbers.num_microbatches + 1))


def _largest(name: str, series: Iterable[Numbers]) -> tuple[Numbers, str] | None:
    """The last numbers before the first that are too wide, and their picture; those that do not fit are passed over."""
    best = None
    for numbers in series:
        with suppress(ValueError):
            if (text := picture(numbers, name)) is None:
                break
            best = numbers, text
    return best
