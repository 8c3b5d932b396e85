"""Figures of a run: its loss over the steps, and what each rank does when. Matplotlib draws them; no screen is needed.

On a page a figure takes the colour of the text around it, so that it can be read on light and on dark ground.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.report.trace import MICROSECOND, PASS, Event, RankTrace, united

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE = "#2a2f36", "#c3c8cf"
BLUE, ORANGE = "#3d7cc9", "#e08a1e"
COLOURS = {
    "F": ("forward", BLUE),
    "B": ("backward", ORANGE),
    "W": ("weight gradients", "#3f9d63"),
    "STEP": ("update", "#8b5fb0"),
    "waiting": ("waiting", PALE),
    "communication": ("sending, summing", "#c2385a"),
}
WIDTH, DPI = 12.0, 150  # inches, dots an inch
LOSS_HEIGHT, ROW_HEIGHT = 4.0, 0.5  # inches
BOX, LINE = (-0.38, 0.66), (0.32, 0.1)  # where in a rank's row: top and height
MIDDLE = BOX[0] + BOX[1] / 2
MAX_STEPS, MAX_BOXES, MAX_ROWS = 3, 48, 32  # in a timeline; of more boxes or rows each gets too little room
MAX_POINTS, NUM_MEANS = 2000, 100  # of a curve, and of a smoothed one
SMALLEST, LARGEST, DIGIT = 5.0, 9.0, 0.66  # font sizes of numbers in points, a digit's width in font sizes
CENTRED = {"color": "white", "ha": "center", "va": "center_baseline", "in_layout": False}
MILLISECONDS = 1e3

Points = list[tuple[float, float]]


class Box(NamedTuple):
    """A span in a timeline; `kind` is one of COLOURS, `number` that of a micro-batch or nothing. Milliseconds."""

    kind: str
    number: str
    left: float
    right: float


def losses(lines: list[dict[str, Any]]) -> tuple[Points, Points]:
    """Training and held-out losses by step, from the lines of metrics.jsonl. That of a skipped step is not a number.

    Of a step that was made twice the later line counts.
    """
    training = {line["step"]: _number(line["loss"]) for line in lines if "loss" in line}
    held_out = {line["step"]: _number(line["eval"].get("loss")) for line in lines if "eval" in line}
    return sorted(training.items()), sorted(point for point in held_out.items() if math.isfinite(point[1]))


def loss_figure(lines: list[dict[str, Any]]) -> Figure:
    """Training and held-out loss over the steps."""
    figure = _figure(LOSS_HEIGHT)
    _draw_losses(figure.subplots(), *losses(lines))
    return figure


def timeline_figure(traces: list[RankTrace]) -> Figure:
    """A row a rank, time to the right. At least one trace must have events."""
    figure = _figure(_timeline_height(traces))
    _draw_timeline(figure.subplots(), traces)
    return figure


def save_picture(path: Path, title: str, lines: list[dict[str, Any]], traces: list[RankTrace]) -> None:
    """A PNG with the losses, and below them the timeline where there are traces."""
    heights = [LOSS_HEIGHT] + ([_timeline_height(traces)] if traces else [])
    figure = _figure(sum(heights) + 0.5)
    figure.suptitle(title, fontsize=15, fontweight="bold", color=INK, parse_math=False)
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    _draw_losses(axes[0], *losses(lines))
    if traces:
        _draw_timeline(axes[1], traces)
    figure.savefig(path, dpi=DPI, facecolor="white", format="png")


def svg(figure: Figure, name: str) -> str:
    """An element for an HTML page. `name` tells its ids from those of other figures there."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    element = text.getvalue()
    element = element[element.index("<svg") :].replace(INK, "currentColor")
    for before in ('id="', 'href="#', "url(#"):
        element = element.replace(before, f"{before}{name}-")
    return element


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    return figure


def _dress(axes: Axes, title: str, across: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    axes.set_xlabel(across, color=INK, fontsize=10)
    axes.tick_params(colors=INK, labelsize=10)
    for side, spine in axes.spines.items():
        spine.set(color=INK, visible=side in ("left", "bottom"))


def _draw_losses(axes: Axes, training: Points, held_out: Points) -> None:
    from matplotlib.ticker import MaxNLocator

    size = max(1, len(training) // NUM_MEANS)
    if training:
        thin = training[:: max(1, len(training) // MAX_POINTS)]
        axes.plot(*zip(*thin), color=BLUE, linewidth=1, alpha=0.35, marker="." if len(thin) < 3 else None)
    if smooth := _means(training, size):
        label = f"training, mean of {size} steps" if size > 1 else "training"
        axes.plot(*zip(*smooth), color=BLUE, linewidth=2, label=label)
    if held_out:
        axes.plot(*zip(*held_out), color=ORANGE, linewidth=1.5, marker="o", markersize=6, label="held-out rows")
    _dress(axes, "Loss", "step")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=PALE, alpha=0.5)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=10, labelcolor=INK)


def _means(points: Points, size: int) -> Points:
    """Of `size` neighbours each; where all of them are no numbers, the curve has a gap."""
    means = []
    for first in range(0, len(points), size):
        group = points[first : first + size]
        finite = [loss for _, loss in group if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        means.append((sum(step for step, _ in group) / len(group), mean))
    return means


def _timeline_height(traces: list[RankTrace]) -> float:
    return 1.3 + ROW_HEIGHT * min(len(traces), MAX_ROWS)


def _draw_timeline(axes: Axes, traces: list[RankTrace]) -> None:
    traces = sorted(traces, key=lambda trace: (trace.replica, trace.stage))
    steps, start, end = shown(traces)
    rows = [_boxes(trace, start, end) for trace in traces]
    for row, boxes in enumerate(rows):
        _draw_row(axes, row, boxes)
    axes.set_xlim(0, (end - start) * MILLISECONDS)
    axes.set_ylim(len(traces) - 0.5, -0.5)
    named = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    _dress(axes, f"Timeline of {named}", "milliseconds")
    axes.set_yticks([row + MIDDLE for row in range(len(traces))], _labels(traces))
    axes.tick_params(axis="y", length=0, labelsize=10 if len(traces) <= MAX_ROWS else 5)
    axes.spines["left"].set_visible(False)
    _explain(axes, {box.kind for boxes in rows for box in boxes})
    _write_numbers(axes, rows)


def shown(traces: list[RankTrace]) -> tuple[list[int], float, float]:
    """Steps from the middle of the run on, so few that their boxes have room; their first and last moment.

    At least one trace must have events.
    """
    aligned = [trace.aligned() for trace in traces]
    steps = sorted({event.step for events in aligned for event in events})
    steps = steps[len(steps) // 2 :][:MAX_STEPS]
    fullest = max(([each for each in events if PASS.fullmatch(each.name)] for events in aligned), key=len)
    while len(steps) > 1 and sum(event.step in steps for event in fullest) > MAX_BOXES:
        steps.pop()
    inside = [event for events in aligned for event in events if event.step in steps]
    inside = [event for event in inside if event.lane != "communication"] or inside
    start, end = min(event.start for event in inside), max(event.end for event in inside)
    ends = sorted(event.end for event in fullest if event.step in steps)
    end = min(end, ends[MAX_BOXES - 1]) if len(ends) > MAX_BOXES else end
    return steps, start, max(end, start + MICROSECOND)


def _boxes(trace: RankTrace, start: float, end: float) -> list[Box]:
    inside = [event for event in trace.aligned() if event.start < end and event.end > start]
    return [
        Box(*_kind(event), (event.start - start) * MILLISECONDS, (event.end - start) * MILLISECONDS) for event in inside
    ]


def _kind(event: Event) -> tuple[str, str]:
    if event.lane != "compute":
        return event.lane, ""
    found = PASS.fullmatch(event.name)
    return found.groups() if found else ("STEP", "")


def _draw_row(axes: Axes, row: int, boxes: list[Box]) -> None:
    for kind, (_, colour) in COLOURS.items():
        spans = [(box.left, box.right) for box in boxes if box.kind == kind]
        if kind in ("waiting", "communication"):
            spans, edge = united(spans), {"linewidth": 0, "alpha": 0.6 if kind == "waiting" else 1}
        else:
            edge = {"edgecolor": PALE, "linewidth": 0.6}
        top, height = LINE if kind == "communication" else BOX
        bars = [(left, right - left) for left, right in spans]
        axes.broken_barh(bars, (row + top, height), facecolor=colour, **edge)


def _labels(traces: list[RankTrace]) -> list[str]:
    """The stage where there are several, the replica likewise."""
    names = RankTrace._fields[:3]
    told = [i for i in range(len(names)) if i == 0 or len({trace[i] for trace in traces}) > 1]
    return [", ".join(f"{names[i]} {trace[i]}" for i in told) for trace in traces]


def _explain(axes: Axes, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=text) for kind, (text, colour) in COLOURS.items() if kind in kinds]
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(patches), "borderaxespad": 0.2}
    axes.legend(handles=patches, frameon=False, fontsize=10, labelcolor=INK, handlelength=1, handleheight=1, **where)


def _write_numbers(axes: Axes, rows: list[list[Box]]) -> None:
    """Of micro-batches into their boxes, where they fit; small ones where boxes are narrow."""
    axes.figure.draw_without_rendering()  # only now the axes have their final width
    points = axes.get_window_extent().width / axes.figure.dpi * 72 / axes.get_xlim()[1]  # in a millisecond
    for row, box in [(row, box) for row, boxes in enumerate(rows) for box in boxes if box.number]:
        size = min(LARGEST, (box.right - box.left) * points / (DIGIT * len(box.number) + 0.2))
        if size >= SMALLEST and box.left >= 0 and box.right <= axes.get_xlim()[1]:
            axes.text((box.left + box.right) / 2, row + MIDDLE, box.number, size=size, **CENTRED)
