"""The plan: what its rows and its picture say, which schedules are left out, and one line for what cannot be."""

import re
import subprocess
import sys

import pytest

from hpctrain.plan import formulas
from hpctrain.plan.schedule import SCHEDULES, Place
from hpctrain.plan.simulate import Times, simulate
from hpctrain.tools import plan
from tests.harness.launch import ROOT


@pytest.fixture
def told(capsys):
    """Lines of the plan with these flags."""

    def tell(*flags) -> list[str]:
        assert plan.run(list(flags), None) == 0
        out, err = capsys.readouterr()
        assert err == "" and "\x1b" not in out
        return [line.rstrip() for line in out.splitlines()]

    return tell


def rows(lines) -> dict[str, list[str]]:
    """Cells by schedule, without the text at the end."""
    found = [re.sub(" %", "%", line).split() for line in lines if line.split(" ")[0] in SCHEDULES]
    return {cells[0]: cells[1:7] for cells in found}


def numbers(**changes) -> plan.Numbers:
    return plan.read_numbers({**plan.parser().parse([]), **changes})


def stages_of(lines) -> list[str]:
    return [line for line in lines if line.startswith("stage ")]


def test_the_table_has_formula_dry_run_time_memory_and_versions_of_every_schedule(told):
    lines = told()
    assert lines[0] == "4 stages, 8 micro-batches; a forward takes 1, a backward 2, a message 0"
    assert rows(lines) == {
        "naive": ["75.0%", "75.0%", "96", "1", "1", "1"],
        "f-then-b": ["27.3%", "27.3%", "33", "8", "8", "1"],
        "1f1b": ["27.3%", "27.3%", "33", "4", "1", "1"],
        "1f1b-interleaved": ["15.8%", "15.8%", "28.5", "11", "5", "1"],
        "zb-h1": ["11.1%", "11.1%", "27", "4", "1", "(4)"],
        "1f1b-async": ["0.0%", "3.6%", "24.9", "4", "1", "4"],
        "2bw": ["0.0%", "3.6%", "24.9", "4", "1", "2"],
    }
    assert all(any(line.endswith(schedule.summary) for line in lines) for schedule in SCHEDULES.values())
    assert "makespan: of an update, in forwards of a stage; without a flush the mean of 10 updates" in lines
    assert "in flight with chunks: each is 1/2 of a stage's layers" in lines
    assert "(in brackets): until the gradients of weights, 1 of a backward's 2" in lines
    assert not stages_of(lines) and not any(line.startswith("without ") for line in lines)


def test_columns_are_named_and_no_row_is_broken(told):
    above, names, *_ = told("--stages", "12", "--num-microbatches", "12")[1:]
    assert " ".join(above.split()) == "bubble by bubble in flight in flight weight"
    assert " ".join(names.split()) == "schedule formula simulated makespan stage 0 stage 11 versions"


@pytest.mark.parametrize("width, has_words", [(80, False), (132, True)])
def test_a_narrow_terminal_gets_the_numbers_alone(capsys, monkeypatch, width, has_words):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    assert plan.run([], None) == 0
    out = capsys.readouterr().out
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert "\x1b" in out and max(map(len, lines[1:10])) <= width
    assert list(rows(lines)) == list(SCHEDULES) and rows(lines)["naive"][:3] == ["75.0%", "75.0%", "96"]
    assert {any(schedule.summary in line for line in lines) for schedule in SCHEDULES.values()} == {has_words}


def test_figures_are_those_of_the_formulas_and_of_the_simulation(told):
    flags = "--stages 3 --num-microbatches 6 --chunks 3 --forward 2 --backward 5 --weights 1.5 --link 0.25 --slow 1:2"
    found = rows(told(*flags.split(), "--updates", "3"))
    times = Times([2, 4, 2], [5, 10, 5], [1.5, 3, 1.5], 0.25)
    for name, schedule in SCHEDULES.items():
        options = {"num_updates": 1 if schedule.flushes else 3, "num_chunks": 3 if schedule.has_chunks else 1}
        timeline = simulate(name, 3, 6, times, **options)
        formula = formulas.bubble_rate(name, Place(0, 3, 6, **options), 2, 5, 1.5)
        makespan = timeline.makespan / options["num_updates"] / 2
        peak = str(timeline.peak_in_flight[0])
        expected = [f"{100 * formula:.1f}%", f"{100 * timeline.bubble_rate:.1f}%", f"{makespan:.6g}", peak]
        assert found[name][:4] == expected, name


def test_slow_stages_and_links_are_said_with_what_the_formula_knows_of_them(told):
    lines = told("--slow", "2:1.5", "--slow", "0:2", "--link", "0.5")
    assert lines[0].endswith("a message 0.5, stage 0 2 times as long, stage 2 1.5 times as long")
    assert "bubble by formula: of stages that take the same time, and messages that take none" in lines
    assert not any(line.startswith("bubble by formula:") for line in told())


def test_a_schedule_that_does_not_fit_is_left_out_with_the_reason(told):
    lines = told("--num-microbatches", "3")
    assert list(rows(lines)) == ["naive", "f-then-b", "1f1b", "zb-h1", "1f1b-async"]
    assert "without 2bw: --num-microbatches 3: --schedule 2bw takes 4 or more, one a stage" in lines
    assert (
        "without 1f1b-interleaved: --num-microbatches 3: --schedule 1f1b-interleaved takes multiples of --stages,"
        " such as 4"
    ) in lines


def test_a_longer_warm_up_concerns_those_that_have_one(told):
    plain, longer = rows(told()), rows(told("--warmup", "2"))
    assert {name for name in SCHEDULES if plain[name] != longer[name]} == {"1f1b", "zb-h1"}
    assert longer["1f1b"][3] == "7"


def test_weights_are_half_of_a_backward_unless_said():
    assert numbers(backward=3.0).weights == 1.5 and numbers(backward=3.0, weights=0.5).weights == 0.5


def test_a_schedule_of_its_own_has_a_picture(told):
    lines = told("--schedule", "zb-h1", "--stages", "3", "--num-microbatches", "4")
    assert rows(lines) == {"zb-h1": ["14.3%", "14.3%", "14", "3", "1", "(3)"]}
    assert stages_of(lines) == [line.rstrip() for line in simulate("zb-h1", 3, 4).picture().splitlines()]
    assert lines[lines.index(stages_of(lines)[0]) - 1] == ""


def test_a_picture_has_columns_as_fine_as_its_times(told):
    flags = ("--schedule", "1f1b", "--stages", "2", "--num-microbatches", "2")
    assert stages_of(told(*flags, "--forward", "0.002", "--backward", "0.003")) == [
        "stage 0 | F0 F0 F1 F1  .  .  . B0 B0 B0  .  . B1 B1 B1",
        "stage 1 |  .  . F0 F0 B0 B0 B0 F1 F1 B1 B1 B1  .  .  .",
    ]


@pytest.mark.parametrize(
    "flags, fits",
    [
        ("--schedule 1f1b-interleaved", "--num-microbatches 4"),
        ("--schedule 1f1b --num-microbatches 5000", "--num-microbatches 12"),
        ("--schedule 2bw", "--updates 1"),
        ("--schedule 1f1b-async --num-microbatches 100", "--num-microbatches 12 --updates 1"),
        ("--schedule 1f1b --stages 40", "--stages 21 --num-microbatches 1"),
        ("--schedule 1f1b --stages 40 --slow 39:2", "--stages 21 --num-microbatches 1"),
    ],
)
def test_too_wide_a_picture_is_drawn_of_the_largest_numbers_that_fit(told, flags, fits):
    lines = told(*flags.split())
    assert f"too wide for a picture of 200 columns; this one is with {fits}:" in lines
    assert 100 < max(map(len, stages_of(lines))) <= 200
    name, *_ = flags.split()[1:]
    again = told("--schedule", name, *(fits + (" --stages 4" if "--stages" not in fits else "")).split())
    assert stages_of(again) == stages_of(lines), "the numbers named do not give this picture"


def test_times_that_no_picture_has_columns_for_are_told(told):
    lines = told("--schedule", "1f1b", "--backward", "2.0137")
    assert lines[-1] == (
        "too wide for a picture of 200 columns; rounder times would do, such as --forward 1 --backward 2"
    )
    assert "1f1b" in rows(lines)


def test_one_stage_never_waits(told):
    lines = told("--stages", "1", "--schedule", "1f1b", "--num-microbatches", "2")
    assert rows(lines)["1f1b"] == ["0.0%", "0.0%", "6", "1", "1", "1"]
    assert stages_of(lines) == ["stage 0 | F0 B0 B0 F1 B1 B1"]


@pytest.mark.parametrize(
    "flags, what",
    [
        ("--schedule 1f1b-interleaved --chunks 1", "--schedule 1f1b-interleaved: needs --chunks 2 or more, with 1 it"),
        ("--schedule 1f1b --chunks 2", "--chunks 2: --schedule 1f1b has one chunk of layers a stage"),
        ("--schedule 2bw --num-microbatches 2", "--num-microbatches 2: --schedule 2bw takes 4 or more, one a stage"),
        ("--schedule naive --warmup 2", "--warmup 2: belongs to --schedule 1f1b or zb-h1, not to naive"),
        ("--schedule 1f1b --updates 2", "--updates 2: belongs to --schedule 1f1b-async or 2bw, not to 1f1b"),
        ("--schedule gpipe", "--schedule: invalid choice: 'gpipe' (choose from "),
        ("--slow 4:2", "--slow 4:2: with --stages 4 there are 0 to 3"),
        ("--slow 1", "--slow: expected STAGE:FACTOR, such as 2:1.5, got '1'"),
        ("--slow 1:0", "--slow: expected STAGE:FACTOR, such as 2:1.5, got '1:0'"),
        ("--weights 3", "--weights 3: is a part of --backward, at most 2"),
        ("--stages 0", "--stages: expected a whole number >= 1, got '0'"),
        ("--forward nan", "--forward: expected a number > 0, got 'nan'"),
        ("--link -1", "--link: expected a number >= 0, got '-1'"),
        (
            "--num-microbatches 99999",
            "--num-microbatches 99999: at most 12500 with so many stages and updates",
        ),
        ("--updates 9999", "--num-microbatches 8: at most 2 with so many stages and updates"),
        ("--stage 3", "--stage: no such flag; did you mean --stages?"),
        ("4", "4: no such flag; --help lists the flags"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(capsys, flags, what):
    assert plan.run(flags.split(), None) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"hpctrain: {what}") and err.count("\n") == 1


def test_no_number_that_is_allowed_takes_long():
    longest = numbers(stages=100, num_microbatches=500)
    assert longest.updates == 2, "an update less than asked for where ten are too many"
    assert numbers(schedule="1f1b").updates == 1 and numbers(updates=3, schedule="2bw").updates == 3


def test_a_plan_needs_neither_torch_nor_mpi():
    program = "import sys; from hpctrain import cli; code = cli.main(['plan'], None); "
    program += "print(code, *({'torch', 'mpi4py'} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout.splitlines()[-1] == "0", ended.stderr


def test_a_reader_that_has_seen_enough_is_no_error():
    program = "from hpctrain.tools.alone import on_rank_0; exit(on_rank_0(None, lambda: print('x' * 10**6)))"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **streams) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.mpi(min_size=2)
def test_one_rank_prints_and_all_return_the_same(capsys):
    from mpi4py.MPI import COMM_WORLD as comm

    assert plan.run(["--stages", "2"], comm) == 0
    assert bool(capsys.readouterr().out) == (comm.rank == 0)
    assert plan.run(["--stages", "x"], comm) == 2
    assert bool(capsys.readouterr().err) == (comm.rank == 0)
