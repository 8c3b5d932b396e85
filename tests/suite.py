"""The whole test suite: its parts one after another, each under a time limit, and one verdict over all of them.

python tests/suite.py                      everything but the parts wide, hosts, slurm and gpu
python tests/suite.py --parts comm,pure    these parts only
python tests/suite.py --parts wide         the widest matrices, and 5 and 8 ranks: what is marked wide
python tests/suite.py --parts hosts        over emulated hosts, as root
python tests/suite.py --parts slurm        under a Slurm of our own, as root
python tests/suite.py --parts gpu          on a CUDA device
python tests/suite.py --mpi-only           what starts MPI, for a second MPI
python tests/suite.py --ranks 3            the tests of all parts that run under mpirun, on 3 ranks
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script finds the modules beside itself only

from tests.harness.launch import launcher_env, mpirun, run, run_python  # noqa: E402
from tests.harness.leftovers import remove_shared_memory, shared_memory  # noqa: E402
from tests.harness.verdict import Launch, Name, judge, junit_name, read_junit  # noqa: E402


@dataclass(frozen=True)
class Part:
    """One launch of pytest: on `ranks` ranks (0: one process without mpirun), in at most `limit` seconds."""

    name: str
    ranks: int
    limit: float
    paths: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    what: str = ""  # where a part has several launches on as many ranks

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.name, self.what, f"n={self.ranks}" if self.ranks else "")))


OWN_LAUNCHES = ("tests/failing", "tests/cli", "tests/benchmarks")  # their tests start mpirun themselves
NO_LAUNCHES = tuple(f"--deselect={path}/" for path in OWN_LAUNCHES)
UNDER_MPI = ("--with-mpi", "-p", "no:hypothesispytest", "-p", "no:typeguard")  # plugins not used there
ALL, NARROW, WIDE_ONES = ("-m", "mpi"), ("-m", "mpi and not wide"), ("-m", "mpi and wide")
# by no more ranks differently
DONE_BY_FOUR = ("number_of_micro_batches", "[1-", "[2-", "[3-", "[4-")
NEEDS_MORE = " or ".join(
    ("[3-2-", "[4-2-", "[8-1-", "[2-3-", "[2-4-", "[3-3-", "[7-1-", "[5-1-", "[5-2-")
)  # of stages, or of servers
PIPELINES = "(test_pipeline or test_asynchronous or test_served or test_replay)"
BY_EIGHT = f"(not {PIPELINES} and not ({' or '.join(DONE_BY_FOUR)})) or ({PIPELINES} and ({NEEDS_MORE}))"
OF_EIGHT = "equivalence executor run data pipeline asynchronous served replay resume_layouts"
WITH_EIGHT = tuple(f"tests/train/test_{name}.py" for name in OF_EIGHT.split())
TRAIN = ("tests/train", "tests/model", "tests/tools")
FOUR_RANKS = tuple(f"tests/comm/test_{name}.py" for name in ("ring", "node", "compressed", "tuning"))  # 3 tell the rest
PARTS = (
    Part("pure", 0, 600, ("tests",), ("-m", "not mpi and not wide", *NO_LAUNCHES)),
    *(Part("comm", ranks, 240, ("tests/comm",), NARROW) for ranks in (1, 2, 3)),
    Part("comm", 4, 240, FOUR_RANKS, NARROW),
    Part("train", 4, 600, TRAIN, NARROW),
    Part("failing", 0, 1200, OWN_LAUNCHES[:1], ("-m", "not wide")),
    Part("cli", 0, 900, OWN_LAUNCHES[1:], ("-m", "not wide")),
)
WIDE = (  # where it is asked for by name
    Part("wide", 0, 600, ("tests",), ("-m", "not mpi and wide", *NO_LAUNCHES), "pure"),
    Part("wide", 8, 240, ("tests/comm",), ALL, "comm"),
    Part("wide", 5, 240, ("tests/comm/test_ring.py",), ALL, "ring"),
    Part("wide", 4, 600, TRAIN, WIDE_ONES, "train"),
    Part("wide", 8, 600, WITH_EIGHT, (*ALL, "-k", BY_EIGHT), "train"),
    Part("wide", 0, 900, OWN_LAUNCHES, ("-m", "wide"), "launches"),
)
APART = (  # where they are asked for by name: they need root, Linux and tools, or a device
    Part("hosts", 0, 600, ("tests/hosts",)),
    Part("slurm", 0, 900, ("tests/slurm",)),
    Part("gpu", 0, 225, ("tests/gpu",)),
)
ALL_NAMES = tuple(dict.fromkeys(part.name for part in PARTS))


def main(argv=None) -> int:
    options = _parser().parse_args(argv)
    parts = select(options)
    before = shared_memory()
    collected = collect(parts)
    launches = [execute(part) for part in parts]
    if removed := remove_shared_memory(before):
        print(f"removed from /dev/shm: {', '.join(removed)}")
    verdict = judge(launches, collected)
    print(*verdict.failed, str(verdict), sep="\n")
    return 1 if verdict.failed or not verdict.passed else 0


def select(options) -> list[Part]:
    """The parts that the command line asks for; ValueError names a part that does not exist."""
    names = options.parts.split(",") if options.parts else ALL_NAMES
    known = dict.fromkeys((*ALL_NAMES, *(part.name for part in (*WIDE, *APART))))
    if unknown := set(names) - set(known):
        raise ValueError(f"--parts: no part {', '.join(sorted(unknown))}; parts: {', '.join(known)}")
    parts = [part for part in (*PARTS, *WIDE, *APART) if part.name in names]
    if options.mpi_only:
        parts = [part for part in parts if part.name != "pure"]
    if options.ranks:
        paths = dict.fromkeys(path for part in parts if part.ranks for path in part.paths)
        parts = [Part("mpi", options.ranks, 900, tuple(paths), ALL)]
    return parts


def collect(parts: list[Part]) -> list[Name] | None:
    """The names of all tests that `parts` have to run, None where they are only some of those that belong together.

    Without running any; AssertionError when a test module cannot be imported.
    """
    wanted = {PARTS: "not wide", WIDE: "wide", (*PARTS, *WIDE): "wide or not wide"}.get(tuple(parts))
    if wanted is None:
        return None
    command = ("-m", "pytest", "--collect-only", "-q", "--disable-warnings", "-m", wanted, "tests")
    result = run_python(*command, timeout=300, env={"PYTEST_ADDOPTS": None})
    assert result.returncode == 0, f"collecting the tests: {result}"
    return [junit_name(line) for line in result.stdout.splitlines() if "::" in line]


def execute(part: Part) -> Launch:
    """Run one part; prints its line, and the whole output when something is wrong with it."""
    paths = tuple(path for path in part.paths if (ROOT / path).exists())
    with tempfile.TemporaryDirectory() as folder:
        log, junit = Path(folder, "log"), Path(folder, "junit.xml")
        launch = _launch(replace(part, paths=paths), log, junit) if paths else Launch(part.title)
        counts = ", ".join(f"{launch.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
        print(f"{part.title:<12} {counts}, {launch.seconds:.1f} s {launch.trouble}", flush=True)
        if not launch.ok:
            print(log.read_text(errors="replace"), flush=True)
    return launch


def _launch(part: Part, log: Path, junit: Path) -> Launch:
    under_mpi = UNDER_MPI if part.ranks else ()
    pytest = (sys.executable, "-m", "pytest", "-v", "--durations=5", f"--junitxml={junit}", *under_mpi)
    launcher = (*mpirun(), "-n", str(part.ranks)) if part.ranks else ()
    command, env = (*launcher, *pytest, *part.arguments, *part.paths), launcher_env() if part.ranks else {}
    launch, trouble = Launch(part.title), ""
    try:
        result = run(command, timeout=part.limit, env=env, output=log)
        launch.seconds = result.seconds
        trouble = "" if result.returncode in (0, 1, 5) else f"ended with exit code {result.returncode}"
    except AssertionError as error:
        launch.seconds, trouble = part.limit, str(error).splitlines()[0]
    launch.outcomes = read_junit(junit) if junit.exists() else {}
    launch.trouble = trouble or ("" if junit.exists() else "ended without a report")
    return launch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", metavar="NAME,NAME", help="only these parts")
    parser.add_argument("--mpi-only", action="store_true", help="only the parts that start MPI")
    parser.add_argument("--ranks", type=int, metavar="N", help="one launch of all tests under mpirun, on N ranks")
    return parser


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
