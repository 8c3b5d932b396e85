"""The benchmarks of pipelines: what they print of made-up figures, what --check finds in them, and one launch."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest

from hpctrain.plan.schedule import SCHEDULES
from tests.harness.launch import ROOT, run_mpi

BUBBLE, PEERS = ROOT / "benchmarks/pipeline_bubble.py", ROOT / "benchmarks/peers/pipeline.py"


def names_of(script):
    """What a script defines, which finds its neighbours as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)
        return SimpleNamespace(**runpy.run_path(str(script)))


@pytest.fixture(scope="module")
def bubble():
    return names_of(BUBBLE)


@pytest.fixture(scope="module")
def peers():
    return names_of(PEERS)


def row(bubble, schedule="1f1b", **changes):
    """A row as it should be."""
    good = {"stages": 4, "num_microbatches": 16, "num_updates": 1, "slow": None, "formula": 0.158, "simulated": 0.16}
    more = {"measured": 0.17, "simulated_ms": 570.0, "measured_ms": 580.0, "in_flight": 4, "versions": 1}
    return bubble.Row(schedule, **{**good, **more, **changes})


def test_a_row_stands_under_its_header(bubble):
    for each in (row(bubble), row(bubble, "1f1b-interleaved", simulated_ms=12345.6), row(bubble, slow="1:2")):
        assert len(each.line()) == len(bubble.HEADER)
    assert " ".join(row(bubble).line().split()) == "1f1b 4 16 15.8% 16.0% 17.0% 570.0 ms 580.0 ms 4 1"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"measured": 0.21}, "1f1b: a bubble of 21.0%, the formula has 15.8%"),
        ({"measured_ms": 640.0}, "1f1b: a step of 640.0 ms, the simulation has 570.0 ms"),
        ({"measured_ms": 500.0}, "1f1b: a step of 500.0 ms, the simulation has 570.0 ms"),
        ({"slow": "1:2", "simulated": 0.45, "measured": 0.46}, None),
        (
            {"slow": "1:2", "simulated": 0.45, "measured": 0.17},
            "1f1b --slow 1:2: a bubble of 17.0%, the simulation has",
        ),
        ({"schedule": "2bw", "formula": 0.0}, None),
        ({"schedule": "2bw", "formula": 0.0, "measured": 0.05}, "2bw: a bubble of 5.0%, the simulation has 16.0%"),
    ],
)
def test_the_check_holds_a_row_against_what_it_should_be(bubble, changes, words):
    found = row(bubble, **changes).faults()
    assert len(found) == (words is not None)
    assert not found or found[0].startswith(words)


def test_a_makespan_is_the_median_over_stages_and_all_runs_but_the_first(bubble):
    first, second = [[0, 9], [10, 14], [20, 23]], [[0, 9], [11, 15], [21, 27]]
    assert bubble.makespan([first, second]) == (5 + 7) / 2


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 1, "one rank is no pipeline"),
        ("--steps 2", 4, "--steps 2: 3 or more"),
        ("--steps few", 4, "--steps: invalid int value: 'few'"),
        ("--updates 0", 4, "--updates 0: 1 or more"),
        ("--forward 0", 4, "--forward 0: expected milliseconds"),
        ("--weights 80", 4, "--weights 80: a share of --backward 80"),
        ("--microbatches 6", 4, "--microbatches 6: expected a multiple of the 4 stages"),
        ("--slow 4:2", 4, "--slow 4:2: expected STAGE:FACTOR with a stage below 4"),
        ("--slow 1:x", 4, "--slow 1:x: expected STAGE:FACTOR"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(bubble, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}.*$"):
        bubble.parse(argv.split(), ranks)


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 3, "3 ranks; start it by mpirun -n 2"),
        ("--width 0", 2, "--width 0: expected a whole number >= 1"),
        ("--microbatches 5", 2, "--microbatches 5: --batch-size 32 does not divide by it"),
    ],
)
def test_a_mistake_beside_the_peer_is_one_line_too(peers, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        peers.parse(argv.split(), ranks)


def test_a_pair_is_seen_beside_the_ideal(peers):
    pair = peers.with_ratios({"hpctrain": 0.5, "torch": 0.6, "alone": 0.8}, 8)
    assert pair["ideal"] == pytest.approx(0.45)
    assert " ".join(peers.line(3, pair).split()) == "3 500.0 ms 600.0 ms 800.0 ms 450.0 ms 1.200 90.0%"
    assert len(peers.line(3, pair)) == len(peers.HEADER)


@pytest.mark.parametrize(
    "ratio, share, different, words",
    [
        (1.2, 0.9, 1e-7, []),
        (1.2, 0.9, 1e-3, ["weights differ by 1.0e-03"]),
        (1.05, 0.9, 0.0, ["torch takes 1.050 times as long"]),
        (1.05, 0.8, 0.0, ["torch takes 1.050 times as long", "80.0% of the ideal"]),
    ],
)
def test_the_check_beside_the_peer(peers, ratio, share, different, words):
    pairs = [{"ratio": ratio + add, "share": share + add} for add in (-0.3, 0.0, 0.3)]
    found = peers.faults({"differences": {"losses": 0.0, "weights": different}, "pairs": pairs})
    assert len(found) == len(words) and all(line.startswith(word) for line, word in zip(found, words))


def test_a_launch_prints_a_row_for_each_schedule_and_writes_all_figures(bubble, tmp_path):
    flags = "--forward 1 --backward 2 --weights 1 --microbatches 4 --steps 3 --updates 2 --slow 0:3"
    result = run_mpi(2, [sys.executable, BUBBLE, *flags.split(), "--json", tmp_path / "figures.json"], timeout=60)
    assert result.returncode == 0, result
    title, header, *lines = result.stdout.splitlines()
    assert title.startswith("2 ranks, ") and header == bubble.HEADER
    assert [line[: len("1f1b-interleaved")].strip() for line in lines] == [*SCHEDULES, "1f1b 0:3"]
    written = json.loads((tmp_path / "figures.json").read_text())
    rows = [bubble.Row(**each) for each in written["rows"]]
    assert written["flags"]["forward"] == 1 and [each.line() for each in rows] == lines
    assert [each.formula for each in rows[:3]] == pytest.approx([1 / 2, 1 / 5, 1 / 5])
    assert [each.in_flight for each in rows[:3]] == [1, 4, 2]
    assert [each.versions for each in rows] == [1, 1, 1, 1, 1, 2, 2, 1]
    assert all(0 < each.measured < 1 and each.measured_ms > 0.9 * each.simulated_ms for each in rows)
