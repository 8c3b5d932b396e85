"""The report of a run as one HTML file that needs nothing else: no script, no style and no picture from outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hpctrain.report.summary import MEGABYTE, counted, table_rows
from hpctrain.report.trace import RankTrace, bubble_rate, hidden_share, lane_shares

STYLE = """
:root { color-scheme: light dark; --line: #d5d9de; --quiet: #5d6672; --ground: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --line: #3b4149; --quiet: #a2abb6; --ground: #1e2227; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.quiet { color: var(--quiet); }
table { border-collapse: collapse; } th, td { padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); }
th { text-align: left; font-weight: 600; white-space: nowrap; }
table.numbers th, table.numbers td { text-align: right; padding: .25rem 0 .25rem 1.6rem; }
table.numbers td { font-variant-numeric: tabular-nums; } table.numbers :first-child { padding-left: 0; }
figure { margin: 1rem 0; overflow-x: auto; } svg { width: 100%; height: auto; min-width: 40rem; }
pre { background: var(--ground); padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; font-size: 13px; }
""".strip()
BUBBLES = {
    "formula": "of the schedule, stages that all take the same time",
    "simulated": "a dry run with the times of the stages as they are",
    "measured": "median over the steps of the trace",
}
SHARES = ("compute", "waiting", "rest")
ABSENT = "\u2013"


def page(
    title: str,
    config: str | None,
    summary: dict[str, Any] | None,
    num_steps: int,
    traces: list[RankTrace],
    figures: dict[str, str],
) -> str:
    """The whole file. `config` is the text of config.toml, `summary` None of a run that has not finished after
    `num_steps`; `figures` are SVG elements, `loss` and, where there are traces, `timeline`."""
    parts = [f"<h1>{escape(title)}</h1>", _lead(summary, num_steps)]
    if summary is not None:
        parts += ["<h2>Summary</h2>", _table(None, table_rows(summary))]
    parts.append(f"<figure>{figures['loss']}</figure>")
    if summary is not None:
        parts += _pipeline(summary, traces)
    if traces:
        parts += _time(traces, figures.get("timeline"))
    if config is not None:
        parts += ["<h2>Configuration</h2>", f"<pre>{escape(config)}</pre>"]
    head = f'<meta charset="utf-8">\n<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _lead(summary: dict[str, Any] | None, num_steps: int) -> str:
    if summary is None:
        return f"<p><strong>Unfinished:</strong> no summary.json yet; {counted(num_steps, 'step')} so far.</p>"
    said = [summary.get("task"), summary.get("schedule") and f"schedule {summary['schedule']}"]
    return f'<p class="quiet">{escape(", ".join(map(str, filter(None, said))))}</p>'


def _pipeline(summary: dict[str, Any], traces: list[RankTrace]) -> list[str]:
    """Two tables, of bubbles and of stages; each only where there is something to say."""
    rates = {**dict.fromkeys(BUBBLES), **(summary.get("bubble_rate") or {})}
    if rates["measured"] is None:
        rates["measured"] = bubble_rate(traces)
    bubbles = [(name, _percent(rates[name]), meaning) for name, meaning in BUBBLES.items()]
    stages = list(_stages(summary))
    parts = []
    if summary.get("bubble_rate") or rates["measured"] is not None:
        parts += [
            "<h2>Bubble</h2>",
            '<p class="quiet">Idle share of the time of all stages.</p>',
            _table(None, bubbles),
        ]
    if stages:
        names = ("stage", "layers", "parameters", "peak in flight", "weight versions", "activations")
        parts += ["<h2>Stages</h2>", _table(names, stages)]
    return parts


def _stages(summary: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    columns = [summary.get(key) or [] for key in ("peak_in_flight", "weight_versions", "peak_activation_bytes")]
    parts = summary.get("stages") or []
    for stage in range(max(map(len, (*columns, parts)))):
        peak, versions, size = (column[stage] if stage < len(column) else None for column in columns)
        part = parts[stage] if stage < len(parts) else {}
        megabytes = None if size is None else f"{size / MEGABYTE:.1f} MB"
        yield tuple(map(_shown, (stage, _layers(part), part.get("parameters"), peak, versions, megabytes)))


def _layers(part: dict[str, Any]) -> str | None:
    if not part.get("layers"):
        return None
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in part["layers"])


def _time(traces: list[RankTrace], timeline: str | None) -> list[str]:
    error = max(trace.error for trace in traces) * 1e6
    said = [f"The clocks of the ranks agree to within {error:.1f} microseconds."]
    if (hidden := hidden_share(traces)) is not None:
        said.append(f"In {_percent(hidden)} of the time in which a rank sends or sums it computes as well.")
    if dropped := sum(trace.dropped for trace in traces):
        said.append(f"{counted(dropped, 'event')} after the first ones of a rank were not recorded.")
    rows = [
        (*map(_shown, (trace.rank, trace.stage, trace.replica)), *(_percent((shares or {}).get(k)) for k in SHARES))
        for trace, shares in zip(traces, lane_shares(traces))
    ]
    figure = [f"<figure>{timeline}</figure>"] if timeline else []
    text = f'<p class="quiet">{escape(" ".join(said))}</p>'
    return ["<h2>Time</h2>", *figure, text, _table(("rank", "stage", "replica", *SHARES), rows)]


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.1f} %"


def _shown(value: Any) -> str:
    return ABSENT if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _table(names: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    """With `names` a table of numbers; without, the first cell of each row is its heading."""
    lines = [] if names is None else ["".join(f"<th>{escape(name)}</th>" for name in names)]
    for first, *others in rows:
        tag = "th" if names is None else "td"
        cells = [f"<{tag}>{escape(first)}</{tag}>", *(f"<td>{escape(cell)}</td>" for cell in others)]
        lines.append("".join(cells))
    kind = "" if names is None else ' class="numbers"'
    return f"<table{kind}>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"
