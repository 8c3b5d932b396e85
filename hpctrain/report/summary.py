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
    rows = [
        ("ranks", _layout(summary.get("layout"))),
        ("steps", _steps(summary.get("steps"), summary.get("skipped_steps"))),
        ("training loss", _losses(summary.get("first_loss"), summary.get("final_loss"))),
        *_metrics(summary.get("eval"), summary.get("baseline")),
        ("step", _text("{:.4g} s", summary.get("step_seconds"))),
        ("speed", _text("{:.1f} rows/s", summary.get("samples_per_second"))),
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


def _megabytes(by_rank: list[int] | None) -> str | None:
    if not by_rank:
        return None
    low, high = (f"{number / MEGABYTE:.1f}" for number in (min(by_rank), max(by_rank)))
    return f"{low} MB" if low == high else f"{low} to {high} MB"
