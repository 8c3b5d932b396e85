"""summary.json, whole or not at all, and the table that a user reads of it.

A reader takes the file's existence for the end of a run, so it comes into being by a rename, once its bytes are on
disk.
"""

import json
import os
from pathlib import Path
from typing import Any

from hpctrain.report.metrics import finite

MEGABYTE = 1e6


def write_json(path: str | Path, value: Any, indent: int | None = 2) -> None:
    """Writes `value` as JSON (NaN and infinity as null) under a temporary name, then renames it to `path`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(finite(value), file, indent=indent, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def table_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and values of the closing table; what the summary lacks, or has as None, has no row."""
    stages = (summary.get("layout") or {}).get("stages") or 1
    rows = [
        ("ranks", _layout(summary.get("layout"))),
        ("steps", _steps(summary.get("steps"), summary.get("skipped_steps"))),
        ("training loss", _losses(summary.get("first_loss"), summary.get("final_loss"))),
        *_metrics(summary.get("eval"), summary.get("baseline")),
        ("step", _text("{:.4g} s", summary.get("step_seconds"))),
        ("speed", _text("{:.1f} rows/s", summary.get("samples_per_second"))),
        *(_pipeline(summary) if stages > 1 else []),
        ("trace", _trace(summary.get("trace"))),
        ("sent per rank", _megabytes(summary.get("bytes_sent_per_rank"))),
        ("memory per rank", _megabytes(summary.get("peak_memory_bytes"))),
        ("weights", _text("sha256 {:.16}", summary.get("weights_sha256"))),
    ]
    return [(label, value) for label, value in rows if value is not None]


def _text(template: str, value: Any) -> str | None:
    return None if value is None else template.format(value)


def _layout(layout: dict[str, int] | None) -> str | None:
    if not layout:
        return None
    stages, replicas, servers = (layout.get(key) or 0 for key in ("stages", "replicas", "servers"))
    tail = f", {counted(servers, 'server')}" if servers else ""
    return f"{layout['ranks']}: {counted(stages, 'stage')} x {counted(replicas, 'replica')}{tail}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _steps(steps: int | None, skipped: int | None) -> str | None:
    return _text("{} (" + str(skipped) + " skipped)" if skipped else "{}", steps)


def _losses(first: float | None, final: float | None) -> str | None:
    return None if first is None or final is None else f"first {first:.4f}, final {final:.4f}"


def _metrics(held_out: dict[str, float] | None, baseline: dict[str, float] | None) -> list[tuple[str, str | None]]:
    """One row a metric, the yardstick of the same name beside it."""
    baseline = baseline or {}
    return [
        (f"held-out {name}", _text("{:.4f}", value) + (_text(" (baseline {:.4f})", baseline.get(name)) or ""))
        for name, value in (held_out or {}).items()
        if value is not None
    ]


def _pipeline(summary: dict[str, Any]) -> list[tuple[str, str | None]]:
    """What a schedule costs, by stage from the first to the last."""
    versions = summary.get("weight_versions") or []
    return [
        ("schedule", summary.get("schedule")),
        ("bubble", _bubble(summary.get("bubble_rate"))),
        ("in flight", _by_stage(summary.get("peak_in_flight"))),
        ("weight versions", _by_stage(versions) if max(versions, default=1) > 1 else None),
        ("activations", _megabytes(summary.get("peak_activation_bytes"))),
        ("not split", _unsplit(summary.get("stages"))),
    ]


def _bubble(rates: dict[str, float | None] | None) -> str | None:
    known = {name: (rates or {}).get(name) for name in ("formula", "simulated", "measured")}
    return ", ".join(f"{name} {100 * rate:.1f} %" for name, rate in known.items() if rate is not None) or None


def _by_stage(numbers: list[int] | None) -> str | None:
    return " ".join(map(str, numbers or [])) or None


def _unsplit(stages: list[dict[str, Any]] | None) -> str | None:
    """Parameters whose gradients were not put off, although the schedule puts them off."""
    names = [name for stage in stages or [] for name in stage.get("unsplit") or []]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else None


def _trace(trace: dict[str, Any] | None) -> str | None:
    hidden, error, dropped = ((trace or {}).get(key) for key in ("hidden_share", "clock_error", "dropped_events"))
    parts = [
        _text("{:.0f} % of transfers hidden", None if hidden is None else 100 * hidden),
        _text("clocks to {:.3g} ms", None if error is None else 1000 * error),
        f"{counted(dropped, 'event')} left out" if dropped else None,
    ]
    return ", ".join(part for part in parts if part is not None) or None


def _megabytes(by_rank: list[int | None] | None) -> str | None:
    """The least and the most, of those that are known."""
    by_rank = [number for number in by_rank or [] if number is not None]
    if not by_rank:
        return None
    low, high = (f"{number / MEGABYTE:.1f}" for number in (min(by_rank), max(by_rank)))
    return f"{low} MB" if low == high else f"{low} to {high} MB"
