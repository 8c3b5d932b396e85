"""pytest on many ranks: `mpirun -n N python -m pytest --with-mpi -m mpi`; without --with-mpi an ordinary pytest.

Each rank is a pytest process that runs the same tests in the same order. After each test the ranks exchange its
outcome, so that a failure on any rank is a failure of the launch, told by rank 0 alone. A test that takes more than
HPCTRAIN_TEST_LIMIT seconds (60; `@pytest.mark.limit(seconds)` for one test) ends the launch, with the stacks of all.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.harness.once import once
from tests.harness.outcome import describe, merge
from tests.harness.parts import COLLECTED
from tests.harness.ranks import Ranks
from tests.harness.watchdog import Watchdog

SEED = int(os.environ.get("HPCTRAIN_TEST_SEED", "20240229"))
LIMIT = float(os.environ.get("HPCTRAIN_TEST_LIMIT", "60"))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Before pytest configures its own plugins: they must find each rank's own options."""
    if _under_mpi(config):
        config.pluginmanager.register(_start(config), "hpctrain-ranks")


def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): the time this test may take under mpirun")
    config.addinivalue_line("markers", "wide: left to the part wide of tests/suite.py, which make test leaves out")
    config.addinivalue_line("markers", "wide_if(case): wide where case(**parameters) of the test says so")
    if not _under_mpi(config):  # there hypothesis isn't used, and its import would cost each rank 0.2 s
        from hypothesis import settings

        settings.register_profile("hpctrain", derandomize=True, deadline=None, database=None)
        settings.load_profile("hpctrain")


@pytest.hookimpl(tryfirst=True)  # before -m and -k take tests away
def pytest_collection_modifyitems(config, items):
    for item in items:
        if any(marker.kwargs["case"](**item.callspec.params) for marker in item.iter_markers("wide_if")):
            item.add_marker("wide")
    config.stash[COLLECTED] = list(items)


def _under_mpi(config) -> bool:
    with_mpi = config.getoption("--with-mpi") or config.getoption("--only-mpi")
    return with_mpi and not config.getoption("collectonly")


def _start(config) -> RanksPlugin:
    from mpi4py import MPI

    ranks = Ranks(MPI.COMM_WORLD)
    folder = ranks.share(tempfile.mkdtemp(prefix="hpctrain-tests-") if ranks.rank == 0 else None)
    once.folder = Path(folder)
    config.option.basetemp = os.path.join(folder, f"rank-{ranks.rank}")
    if ranks.rank:
        config.option.xmlpath = None
    return RanksPlugin(ranks, Watchdog(ranks, os.dup(2)), Path(folder))


class RanksPlugin:
    """The hooks that make one test session of the N sessions that mpirun started."""

    def __init__(self, ranks: Ranks, watchdog: Watchdog, folder: Path):
        self.ranks, self.watchdog, self.folder = ranks, watchdog, folder
        self.seed = ranks.share(SEED)
        self.watchdog.arm("collecting the tests", 3 * LIMIT)

    def pytest_report_header(self):
        return f"mpi: {self.ranks.name()}, {self.ranks.size} ranks; seed {self.seed}; limit {LIMIT:g} s a test"

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config):
        if self.ranks.rank:  # only rank 0 reports; failures of the others reach it by the exchange
            config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(pytest.TerminalReporter(config, io.StringIO()), "terminalreporter")

    def pytest_collection_finish(self, session):
        for item in session.items:
            if getattr(item.obj, "is_hypothesis_test", False):
                pytest.exit(f"{item.nodeid}: hypothesis would draw other examples on every rank; use shared_seed", 1)
        names = "\n".join(item.nodeid for item in session.items)
        digest = f"{len(session.items)} tests, {hashlib.sha256(names.encode()).hexdigest()[:8]}"
        told = self.ranks.gather(f"{digest}, {session.testsfailed} errors")
        self.watchdog.disarm()
        if len(set(told)) > 1:
            pytest.exit(f"the ranks collected different tests: {dict(enumerate(told))}", 1)

    def pytest_runtest_protocol(self, item, nextitem):
        marker = item.get_closest_marker("limit")
        self.watchdog.arm(item.nodeid, marker.args[0] if marker else LIMIT)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        told = self.ranks.gather(describe(item.nodeid, reports, with_output=self.ranks.rank > 0))
        self.watchdog.disarm()
        for report in merge(reports, told, self._reproduce(item)):
            item.ihook.pytest_runtest_logreport(report=report)
            if report.failed and self.ranks.rank == 0:
                self.watchdog.notes += [f"{item.nodeid} failed before:", *report.longreprtext.splitlines()]
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reproduce(self, item) -> str:
        seed = f"HPCTRAIN_TEST_SEED={self.seed} " if "shared_seed" in getattr(item, "fixturenames", ()) else ""
        return f"{seed}mpirun -n {self.ranks.size} python -m pytest --with-mpi '{item.nodeid}'"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if self.ranks.rank or exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = 0  # rank 0 speaks for all

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        sys.stdout.flush()
        self.watchdog.arm("ending the tests", LIMIT)
        self.ranks.close()
        self.watchdog.disarm()
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def shared_seed(request) -> int:
    """A seed, the same on every rank; HPCTRAIN_TEST_SEED sets it."""
    plugin = request.config.pluginmanager.get_plugin("hpctrain-ranks")
    return plugin.seed if plugin else SEED


@pytest.fixture
def shared_tmp_path(request, tmp_path) -> Path:
    """An empty folder, the same on every rank (tmp_path is another one on each)."""
    plugin = request.config.pluginmanager.get_plugin("hpctrain-ranks")
    return Path(plugin.ranks.share(str(tmp_path))) if plugin else tmp_path
