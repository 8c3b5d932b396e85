"""The sum over all launches of the suite: one outcome a test, and a failure for every test that ran nowhere.

A test that is skipped on 1, 2, 3 and 4 ranks and runs on 5 has passed; one that no launch ever ran is a hole that
looks like a success, so it counts as failed. Names are those of the junit files: (class name, test name).
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

Name = tuple[str, str]


@dataclass
class Launch:
    """What one launch did: the outcome of each test in it, and what went wrong besides (empty: nothing)."""

    title: str
    outcomes: dict[Name, str] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str = ""

    def count(self, outcome: str) -> int:
        return list(self.outcomes.values()).count(outcome)

    @property
    def ok(self) -> bool:
        return not self.trouble and not self.count("failed")


@dataclass(frozen=True)
class Verdict:
    passed: list[Name]
    failed: list[str]  # a line each
    skipped: list[Name]

    def __str__(self) -> str:
        return f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def read_junit(path: Path) -> dict[Name, str]:
    """The outcome of every test in a junit file: passed, failed or skipped."""
    outcomes: dict[Name, str] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = (case.get("classname", ""), case.get("name", ""))
        if outcomes.get(name) != "failed":  # a test that fails in its teardown has two entries
            outcomes[name] = _outcome(case)
    return outcomes


def junit_name(nodeid: str) -> Name:
    """`tests/a/test_b.py::Class::test_c[x]` as the junit file names it."""
    address, bracket, parameters = nodeid.partition("[")
    module, *classes, name = address.split("::")
    return ".".join([module.removesuffix(".py").replace("/", "."), *classes]), name + bracket + parameters


def judge(launches: list[Launch], collected: list[Name] | None) -> Verdict:
    """`collected`: the names of all tests that had to run; None: a skipped test is no failure.

    Nor is it one of other tests.
    """
    seen: dict[Name, set[str]] = {}
    for launch in launches:
        for name, outcome in launch.outcomes.items():
            seen.setdefault(name, set()).add(outcome)
    failed = [_line(name, "failed in " + _where(name, launches)) for name, got in seen.items() if "failed" in got]
    failed += [f"{launch.title}: {launch.trouble}" for launch in launches if launch.trouble]
    passed = [name for name, got in seen.items() if "passed" in got and "failed" not in got]
    skipped = [name for name, got in seen.items() if got == {"skipped"}]
    if collected is not None:
        had_to_run = set(collected)
        failed += [_line(name, "was skipped in every launch") for name in skipped if name in had_to_run]
        failed += [_line(name, "ran in no launch") for name in collected if name not in seen]
        skipped = [name for name in skipped if name not in had_to_run]
    return Verdict(passed, failed, skipped)


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case if child.get("type") != "pytest.xfail"}  # failed as expected: passed
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def _where(name: Name, launches: list[Launch]) -> str:
    return ", ".join(launch.title for launch in launches if launch.outcomes.get(name) == "failed")


def _line(name: Name, what: str) -> str:
    return f"{'.'.join(filter(None, name))} {what}"
