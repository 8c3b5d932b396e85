"""The verdict over launches, on made-up launches: a hole must not look like a success."""

import pytest

from tests.harness.outcome import describe, merge
from tests.harness.verdict import Launch, judge, junit_name, read_junit
from tests.suite import PARTS, WIDE, _parser, select

A, B, C = ("m", "a"), ("m", "b"), ("m", "c")


class Report:
    """As much of pytest's report as the exchange of outcomes uses."""

    def __init__(self, when, outcome, text=""):
        self.when, self.outcome, self.longrepr, self.longreprtext, self.sections = when, outcome, None, text, []

    failed = property(lambda self: self.outcome == "failed")
    skipped = property(lambda self: self.outcome == "skipped")
    passed = property(lambda self: self.outcome == "passed")


def test_skipped_on_few_ranks_and_run_on_more_has_passed():
    verdict = judge([Launch("n=1", {A: "skipped"}), Launch("n=4", {A: "passed"})], [A])
    assert (str(verdict), verdict.failed) == ("1 passed, 0 failed, 0 skipped", [])


def test_failed_in_one_launch_has_failed_and_the_launch_is_named():
    verdict = judge([Launch("n=1", {A: "passed"}), Launch("n=4", {A: "failed"})], [A])
    assert verdict.failed == ["m.a failed in n=4"]
    assert not verdict.passed


@pytest.mark.parametrize(
    "outcomes, line",
    [({A: "passed"}, "m.b ran in no launch"), ({A: "passed", B: "skipped"}, "m.b was skipped in every launch")],
)
def test_a_test_that_ran_nowhere_is_a_failure(outcomes, line):
    assert judge([Launch("n=1", outcomes)], [A, B]).failed == [line]


@pytest.mark.parametrize("collected", [None, [A]])
def test_a_skipped_test_that_did_not_have_to_run_is_only_skipped(collected):
    assert str(judge([Launch("n=1", {A: "passed", B: "skipped"})], collected)) == "1 passed, 0 failed, 1 skipped"


def test_a_launch_without_a_report_is_a_failure():
    assert judge([Launch("n=8", trouble="ended with exit code 76")], []).failed == ["n=8: ended with exit code 76"]


def test_junit_names(tmp_path):
    cases = """<testcase classname="tests.a.test_b.Class" name="test_c[x::y]"/>
        <testcase classname="m" name="a"/><testcase classname="m" name="a"><error/></testcase>
        <testcase classname="m" name="b"><skipped type="pytest.xfail"/></testcase>
        <testcase classname="m" name="c"><skipped type="pytest.skip"/></testcase>"""
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    outcomes = read_junit(tmp_path / "junit.xml")
    assert outcomes.pop(junit_name("tests/a/test_b.py::Class::test_c[x::y]")) == "passed"
    assert outcomes == {A: "failed", B: "passed", C: "skipped"}


def test_a_failure_on_any_rank_replaces_the_outcome_of_this_rank():
    mine = [Report("setup", "passed"), Report("call", "passed"), Report("teardown", "passed")]
    theirs = [Report("setup", "failed", "boom"), Report("teardown", "passed")]
    told = [describe("t", mine, with_output=False), describe("t", theirs, with_output=True)]
    merged = merge(mine, told, "again")
    assert [report.outcome for report in merged] == ["passed", "failed", "passed"]
    assert merged[1].longrepr.startswith("failed on rank 1 of 2")
    assert "(setup) boom" in merged[1].longrepr
    assert merged[1].longrepr.endswith("reproduce: again")


def test_a_test_that_ran_on_some_ranks_has_passed():
    mine = [Report("setup", "passed"), Report("call", "skipped"), Report("teardown", "passed")]
    theirs = [Report("setup", "passed"), Report("call", "passed"), Report("teardown", "passed")]
    told = [describe("t", mine, with_output=False), describe("t", theirs, with_output=True)]
    assert [report.outcome for report in merge(mine, told, "")] == ["passed"] * 3


def test_parts_of_the_suite():
    def titles(*argv):
        return [part.title for part in select(_parser().parse_args(argv))]

    assert titles() == [part.title for part in PARTS]
    assert titles("--parts", "pure,cli") == ["pure", "cli"]
    for name in ("hosts", "slurm"):
        assert titles("--parts", name) == [name] and name not in titles()
    assert titles("--parts", "wide") == [part.title for part in WIDE]
    assert not {*titles("--parts", "wide")} & {*titles()}
    assert "pure" not in titles("--mpi-only")
    assert titles("--ranks", "3") == ["mpi n=3"]
    with pytest.raises(ValueError, match="--parts: no part none"):
        titles("--parts", "none")
