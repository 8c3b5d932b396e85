"""`hpctrain report RUN`: a run's losses, bubbles and timeline as a picture and as a page that opens offline.

A run that still goes on, or was killed, has its losses so far.
"""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config import Parser, UsageError
from hpctrain.report.metrics import read_metrics
from hpctrain.report.page import page
from hpctrain.report.summary import counted
from hpctrain.report.trace import RankTrace, read_trace
from hpctrain.tools.alone import on_rank_0


class Found(NamedTuple):
    """What a run's folder holds; `config` and `summary` are None where it has none."""

    lines: list[dict[str, Any]]
    config: str | None
    summary: dict[str, Any] | None
    traces: list[RankTrace]


def run(argv: list[str], world) -> int:
    """Writes the files on rank 0. Returns 0, or 2 with one line for what cannot be. Collective."""
    return on_rank_0(world, lambda: _report(argv))


def parser() -> Parser:
    top = Parser("hpctrain report", add_help=False)
    top.add_argument("run", metavar="RUN", help="the folder of a run")
    top.add_argument("--out", metavar="FOLDER", help="where report.png and report.html go; default: the run's folder")
    return top


def _report(argv: list[str]) -> str | None:
    """What is wrong, if anything."""
    try:
        asked = parser().parse(argv)
        folder = Path(asked["run"])
        found = read_run(folder)
        if util.find_spec("matplotlib") is None:
            raise UsageError('report: needs the package matplotlib; pip install "hpctrain[report]"')
        _write(found, folder.resolve().name, Path(asked["out"] or folder))
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or asked['run']}: {error.strerror or error}"
    return None


def read_run(folder: Path) -> Found:
    """ValueError, one line, where `folder` is no run's or a file in it is damaged."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; name that of a run, such as runs/text-20300101-120000")
    if not (folder / "metrics.jsonl").is_file():
        raise UsageError(f"{folder}: no run's folder, it has no metrics.jsonl")
    config, summary, trace = (folder / name for name in ("config.toml", "summary.json", "trace.json"))
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else None
    traces = read_trace(trace) if trace.is_file() else []
    return Found(_read_lines(folder / "metrics.jsonl"), text, _read_summary(summary), traces)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = read_metrics(path)
    for number, line in enumerate(lines, 1):
        if not _is_metrics(line):
            raise UsageError(f"{path}, line {number}: no metrics of a step")
    if not lines:
        raise UsageError(f"{path}: no step is in it yet; try again later")
    return lines


def _is_metrics(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    held_out = line.get("eval", {})
    values = [line.get("loss"), held_out.get("loss") if isinstance(held_out, dict) else "none"]
    return all(value is None or isinstance(value, (int, float)) for value in values)


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error})") from None
    if not isinstance(summary, dict):
        raise UsageError(f"{path}: no summary of a run")
    return summary


def _write(found: Found, title: str, out: Path) -> None:
    from hpctrain.report import figures

    lines, config, summary, traces = found
    if summary is not None and summary.get("eval") and "steps" in summary:
        lines = [*lines, {"step": summary["steps"], "eval": summary["eval"]}]
    out.mkdir(parents=True, exist_ok=True)
    drawn = {"loss": figures.svg(figures.loss_figure(lines), "loss")}
    timed = traces if any(trace.events for trace in traces) else []
    if timed:
        drawn["timeline"] = figures.svg(figures.timeline_figure(timed), "timeline")
    figures.save_picture(out / "report.png", title, lines, timed)
    num_steps = max(line["step"] for line in lines)
    text = page(title, config, summary, num_steps, traces, drawn)
    (out / "report.html").write_text(text, encoding="utf-8")
    if summary is None:
        print(f"the run has not finished: no summary.json yet, {counted(num_steps, 'step')} so far")
    print(f"report in {out / 'report.html'} and {out / 'report.png'}")
