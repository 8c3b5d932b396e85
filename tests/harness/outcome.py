"""One outcome from many ranks: a test has failed when it failed anywhere, and rank 0 says where and how."""

from __future__ import annotations

import json

MOST_RANKS, MOST_CHARACTERS = 3, 8000  # shown of a failure; the other ranks are named only


def describe(nodeid: str, reports, with_output: bool) -> str:
    """What one rank tells the others about a test, as JSON; `with_output`: also what a failing test printed."""
    failed = [report for report in reports if report.failed]
    text = "\n".join(_text(report, with_output) for report in failed)
    if failed:
        outcome = "failed"
    else:
        outcome = "skipped" if any(report.skipped for report in reports) else "passed"
    return json.dumps({"nodeid": nodeid, "outcome": outcome, "text": text})


def merge(reports, told: list[str], reproduce: str):
    """This rank's reports, changed where the ranks together had another outcome than this rank.

    `told` holds what `describe` gave on each rank; `reproduce` is a line that is put under every failure.
    """
    outcomes = [json.loads(text) for text in told]
    assert len({entry["nodeid"] for entry in outcomes}) == 1, f"ranks ran different tests: {outcomes}"
    failures = {rank: entry["text"] for rank, entry in enumerate(outcomes) if entry["outcome"] == "failed"}
    if failures:
        return _replace(reports, "failed", failure_text(failures, len(told), reproduce))
    if any(entry["outcome"] == "passed" for entry in outcomes) and any(report.skipped for report in reports):
        return _replace(reports, "passed", None)
    return reports


def failure_text(failures: dict[int, str], size: int, reproduce: str) -> str:
    shown = list(failures.items())[:MOST_RANKS]
    parts = [f"failed on rank{'s' * (len(failures) > 1)} {', '.join(map(str, failures))} of {size}"]
    parts += [f"---------- rank {rank} ----------\n{text[-MOST_CHARACTERS:]}" for rank, text in shown]
    return "\n".join([*parts, f"reproduce: {reproduce}"])


def _replace(reports, outcome: str, longrepr):
    call = next((report for report in reports if report.when == "call"), reports[0])
    call.when, call.outcome, call.longrepr = "call", outcome, longrepr
    call.__dict__.pop("wasxfail", None)
    return [report for report in reports if report is call or report.passed]


def _text(report, with_output: bool) -> str:
    output = [f"-- {title} --\n{content}" for title, content in report.sections] if with_output else []
    return "\n".join([f"({report.when}) {report.longreprtext}", *output])
