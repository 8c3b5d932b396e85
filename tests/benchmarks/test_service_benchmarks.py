"""The benchmarks of parameter servers: formulas and simulation by hand, what --check finds, and a launch of each."""

import importlib
import json
import math
import re
import runpy
import sys
from types import SimpleNamespace

import pytest

from tests.harness.launch import ROOT, run_mpi

PUSH_PULL, STALENESS = ROOT / "benchmarks/push_pull.py", ROOT / "benchmarks/staleness.py"


def names_of(script):
    """What a script defines, which finds its neighbours as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)
        before = {name: sys.modules.pop(name) for name in ("figures", "peers") if name in sys.modules}
        found = SimpleNamespace(**runpy.run_path(str(script)))
        sys.modules.update(before)
        return found


@pytest.fixture(scope="module")
def push_pull():
    return names_of(PUSH_PULL)


@pytest.fixture(scope="module")
def staleness():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STALENESS.parent)
        straggling = importlib.import_module("straggling")
    return SimpleNamespace(**{**vars(straggling), **vars(names_of(STALENESS))})


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 1, "one rank has no server; start it by mpirun -n 2"),
        ("", 3, "--servers 1: expected one worker beside them, these are 3 ranks"),
        ("--bytes --servers 3", 3, "--servers 3: expected one worker beside them, these are 3 ranks"),
        ("--mib 0", 2, "--mib 0: expected a whole number >= 1"),
        ("--sparse-repeats 0", 2, "--sparse-repeats 0: expected a whole number >= 1"),
        ("--pairs few", 2, "--pairs: invalid int value: 'few'"),
        ("--rows 100", 2, "--ids 4096: the table has --rows 100"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(push_pull, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        push_pull.parse(argv.split(), ranks)


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 2, "2 ranks: two workers and a server are the least; start it by mpirun -n 8"),
        ("--rounds 4", 8, "--rounds 4: expected 5 or more"),
        ("--milliseconds 0", 8, "--milliseconds 0: expected more than 0"),
        ("--slow 1.5", 8, "--slow 1.5: expected a probability, from 0 to 1"),
        ("--factor 0.5", 8, "--factor 0.5: expected 1 or more"),
        ("--seed -1", 8, "--seed -1: expected 0 or more"),
    ],
)
def test_a_mistake_beside_stragglers_is_one_line_too(staleness, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        staleness.parse(argv.split(), ranks)


def test_a_wrong_flag_ends_a_launch_with_one_line():
    result = run_mpi(2, [sys.executable, PUSH_PULL, "--mib", "none"], timeout=60)
    assert result.returncode == 2 and result.stdout == "", result
    assert result.stderr.splitlines()[0] == "push_pull.py: --mib: invalid int value: 'none'"


def test_the_interval_of_a_median_is_as_narrow_as_its_certainty_allows(push_pull):
    interval = push_pull.figures.interval
    assert interval([3.0]) == (3.0, 3.0, 0.0)
    assert interval([5, 1, 4, 2, 3]) == (1, 5, 1 - 2 / 32)
    assert interval([*range(7)]) == (0, 6, 1 - 2 / 128)
    assert push_pull.figures.told([3.0], 2) == "one pair, so no interval"
    assert push_pull.figures.told([*range(7)], 2) == "98% from 0.00 to 6.00"
    assert interval([*range(9)]) == (1, 7, 1 - 2 * 10 / 512)


def test_bytes_of_a_round_by_formula(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    traffic = importlib.import_module("traffic")
    assert traffic.formula(6, 2, 8, 1000) == (1000, 3000, 1750)


def test_shares_and_ratios_stand_under_their_headers(push_pull):
    dense = push_pull.with_shares({"down": 0.016, "up": 0.012, "sgd": 0.008, "pull": 0.02, "push": 0.025})
    assert (dense["pull_share"], dense["push_share"]) == pytest.approx((0.8, 0.8))
    assert len(push_pull.dense_line(1, dense)) == len(push_pull.DENSE)
    sparse = push_pull.with_ratios({"pull": 0.001, "rpc_pull": 0.003, "push": 0.002, "rpc_push": 0.007})
    assert (sparse["pull_ratio"], sparse["push_ratio"]) == pytest.approx((3, 3.5))
    assert len(push_pull.sparse_line(1, sparse)) == len(push_pull.SPARSE)
    found = push_pull.ratios([dense] * 3, [sparse])
    assert [len(values) for values in found.values()] == [3, 3, 1, 1]
    assert push_pull.summary(found)[0].startswith("pull: 0.800 of the bandwidth, with 75% from 0.800 to 0.800")


def test_without_rows_nothing_is_asked_of_them(push_pull):
    dense = {"pull_share": 0.5, "push_share": 0.9}
    assert push_pull.faults(push_pull.ratios([dense], [])) == ["pull: 0.500, at least 0.80 was asked for"]


def fixed(staleness, takes):
    """Delays of these seconds, by worker."""
    return SimpleNamespace(workers=len(takes), of=lambda worker, num_rounds: takes[worker])


def test_a_simulated_wait_by_hand(staleness):
    delays = fixed(staleness, [[1.0, 3.0, 1.0], [2.0, 1.0, 1.0]])
    assert staleness.simulated_waiting(delays, 0, 3) == pytest.approx([1 - 5 / 6, 1 - 4 / 6])
    assert staleness.simulated_waiting(delays, 1, 3) == pytest.approx([0.0, 0.0])
    late = fixed(staleness, [[1.0, 1.0, 1.0], [4.0, 4.0, 4.0]])
    assert staleness.simulated_waiting(late, 0, 3) == pytest.approx([1 - 3 / 9, 0.0])
    assert staleness.simulated_waiting(late, 1, 3) == pytest.approx([1 - 3 / 5, 0.0])
    assert staleness.simulated_waiting(late, math.inf, 3) == pytest.approx([0.0, 0.0])


def test_delays_are_those_of_their_seed(staleness):
    delays = staleness.Delays(7, 0.01, 4, 0.1, 3)
    again = [staleness.Delays(7, 0.01, 4, 0.1, 3).of(worker, 1000) for worker in range(7)]
    assert again == [delays.of(worker, 1000) for worker in range(7)] and again[0] != again[1]
    assert {*again[0]} == {0.01, 0.04} and 60 < again[0].count(0.04) < 140
    assert {*delays._replace(always=2).of(2, 50)} == {0.04}


def test_the_share_that_seven_workers_wait_falls_with_the_bound(staleness):
    delays = staleness.Delays(7, 1.0, 4, 0.1, 0)
    shares = [sum(staleness.simulated_waiting(delays, bound, 500)) / 7 for bound in staleness.BOUNDS]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.49, abs=0.03) and shares[3] < 0.1 and shares[4] == pytest.approx(0.0)


def rows_of(shares, losses):
    return [
        {"slow": "at 10%", "bound": bound, "measured": share, "loss": loss}
        for bound, share, loss in zip(("0", "1", "3", "8", "inf"), shares, losses)
    ]


@pytest.mark.parametrize(
    "shares, losses, words",
    [
        ((0.5, 0.3, 0.15, 0.06, 0.01), (3, 2, 2, 1, 1), []),
        ((0.39, 0.3, 0.15, 0.06, 0.01), (3, 2, 2, 1, 1), ["s = 0: workers wait for 39.0%"]),
        (
            (0.5, 0.3, 0.3, 0.11, 0.01),
            (3, 2, 2, 1, 1),
            ["s = 8: workers wait for 11.0%", "s = 3: workers wait for 30.0%"],
        ),
        ((0.5, 0.3, 0.2, 0.1, 0.1), (3, 2, 2, 4, 1), ["s = 8: a loss of 4.00e+00 at equal time"]),
    ],
)
def test_the_check_of_staleness(staleness, shares, losses, words):
    found = staleness.faults(rows_of(shares, losses))
    assert len(found) == len(words) and all(line.startswith(word) for line, word in zip(found, words))


def test_a_loss_is_the_last_one_known_by_then(staleness):
    rows = [
        {"bound": "0", "seconds": 9.0, "losses": [(0.0, 5.0), (4.0, 4.0), (8.0, 3.0)]},
        {"bound": "8", "seconds": 6.0, "losses": [(0.5, 5.0), (2.0, 2.0), (5.9, 1.0)]},
    ]
    staleness.at_equal_time(rows)
    assert [row["loss"] for row in rows] == [4.0, 1.0]
    assert staleness.loss_at([(3.0, 7.0)], 1.0) == 7.0


def test_a_launch_of_pulls_and_pushes_writes_all_figures(push_pull, tmp_path):
    flags = [
        "--mib",
        "1",
        "--rows",
        "500",
        "--width",
        "4",
        "--ids",
        "50",
        "--pairs",
        "2",
        "--repeats",
        "1",
        "--sparse-repeats",
        "2",
    ]
    result = run_mpi(2, [sys.executable, PUSH_PULL, *flags, "--json", tmp_path / "figures.json"], timeout=90)
    assert result.returncode == 0, result
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written.keys() == {"flags", "dense", "sparse"} and written["flags"]["ids"] == 50
    keys = {"down", "up", "sgd", "pull", "push", "pull_share", "push_share"}
    assert [pair.keys() for pair in written["dense"]] == [keys] * 2
    keys = {"pull", "rpc_pull", "push", "rpc_push", "pull_ratio", "push_ratio"}
    assert [pair.keys() for pair in written["sparse"]] == [keys] * 2
    assert push_pull.dense_line(1, written["dense"][0]) in result.stdout.splitlines()


@pytest.mark.wide
def test_two_servers_and_counted_bytes(push_pull, tmp_path):
    flags = ["--servers", "2", "--mib", "1", "--pairs", "1", "--repeats", "1"]
    result = run_mpi(3, [sys.executable, PUSH_PULL, *flags], timeout=90)
    assert result.returncode == 0 and "rows" not in result.stdout, result
    flags = ["--servers", "2", "--mib", "1", "--bytes", "--json", tmp_path / "bytes.json"]
    result = run_mpi(4, [sys.executable, PUSH_PULL, *flags], timeout=90)
    assert result.returncode == 0, result
    written = json.loads((tmp_path / "bytes.json").read_text())
    assert written["counted"] == written["formula"] == {"worker": 1 << 20, "server": 1 << 20, "ring": 3 << 19}


def test_a_launch_with_stragglers_writes_all_figures(staleness, tmp_path):
    flags = ["--rounds", "10", "--milliseconds", "2"]
    result = run_mpi(3, [sys.executable, STALENESS, *flags, "--json", tmp_path / "figures.json"], timeout=90)
    assert result.returncode == 0, result
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["bound"] for row in rows] == ["0", "1", "3", "8", "inf"] * 2
    assert [row["rounds"] for row in rows] == [10] * 5 + [2] * 5
    keys = {"slow", "bound", "rounds", "simulated", "measured", "others", "seconds", "losses", "loss"}
    assert all(row.keys() == keys and len(row["losses"]) == row["rounds"] for row in rows)
    lines = result.stdout.splitlines()
    assert lines[1] == staleness.HEADER and lines[2:-1] == [staleness.line(row) for row in rows]
