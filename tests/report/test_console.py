"""The console: one living line on a terminal, few whole lines elsewhere, and Rich only where something is drawn."""

import io
import re
import subprocess
import sys

import pytest

from hpctrain.report.console import ProgressLine, print_closing
from hpctrain.report.summary import table_rows


class Stream(io.StringIO):
    """Counts flushes; a terminal or not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal, self.num_flushes = terminal, 0

    def isatty(self):
        return self.terminal

    def flush(self):
        self.num_flushes += 1


def line(step, loss=1.5):
    return {"step": step, "loss": loss, "seconds": 0.5, "rows_per_second": 64.0}


def shown(num_steps, terminal=False) -> Stream:
    stream = Stream(terminal)
    progress = ProgressLine(num_steps, stream)
    for step in range(1, num_steps + 1):
        progress.update(line(step))
    progress.close()
    return stream


@pytest.mark.parametrize("num_steps", [1, 2, 19, 20, 21, 39, 200, 1234])
def test_without_a_terminal_few_lines_the_first_and_the_last_step_among_them(num_steps):
    stream = shown(num_steps)
    lines = stream.getvalue().splitlines()
    steps = [int(re.match(rf"step +(\d+)/{num_steps} ", each)[1]) for each in lines]
    assert len(lines) <= 21 and steps == sorted(set(steps))
    assert steps[0] == 1 and steps[-1] == num_steps
    assert len(lines) >= min(num_steps, 20)
    assert stream.num_flushes >= len(lines)
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_a_line_says_step_loss_speed_and_time_left():
    stream = Stream(False)
    progress = ProgressLine(10_000, stream)
    progress.update(line(1, 5.54321))
    assert stream.getvalue() == "step     1/10000  loss 5.5432  64.0 rows/s  1:23:20 left\n"


def test_a_skipped_step_has_no_loss():
    stream = Stream(False)
    ProgressLine(2, stream).update(line(1, None))
    assert stream.getvalue() == "step 1/2  loss   -     64.0 rows/s  0:00:00 left\n"


def test_speed_is_rows_over_seconds_not_the_mean_of_speeds():
    stream = Stream(False)
    progress = ProgressLine(2, stream)
    progress.update({"step": 1, "loss": 1.0, "seconds": 3.0, "rows_per_second": 10.0})
    progress.update({"step": 2, "loss": 1.0, "seconds": 1.0, "rows_per_second": 30.0})
    assert "  15.0 rows/s" in stream.getvalue().splitlines()[-1]


def test_on_a_terminal_one_line_that_ends_with_the_last_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(500, terminal=True).getvalue()
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert visible.count("\n") == 1, "more than one line was left on the screen"
    assert visible.rstrip("\n").rpartition("step")[2].startswith(" 500/500  loss 1.5000")
    assert visible.count("step") < 50, "each step was drawn"
    hidden, shown_again = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert hidden < shown_again, "the cursor stays hidden"


def test_a_run_that_is_killed_leaves_the_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Stream(True)
    progress = ProgressLine(500, stream)
    progress.update(line(1))
    assert stream.getvalue().rfind("\x1b[?25l") < stream.getvalue().rfind("\x1b[?25h")
    progress.close()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(40, terminal=True).getvalue()


def test_the_terminal_that_a_launcher_gives_a_rank_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Stream(True)
    progress = ProgressLine(2, stream, launched=True)
    progress.update(line(1))
    progress.close()
    print_closing({"steps": 2}, "runs/x", stream, launched=True)
    assert "\x1b" not in stream.getvalue() and "steps" in stream.getvalue()


def test_the_closing_table_holds_figures_and_an_unbroken_path():
    stream = Stream(False)
    folder = "/scratch/[project]/" + "long/" * 40
    print_closing({"steps": 200, "eval": {"loss": 2.0}, "baseline": {"loss": 2.5}}, folder, stream)
    lines = [each.rstrip() for each in stream.getvalue().splitlines()]
    assert lines == ["steps          200", "held-out loss  2.0000 (baseline 2.5000)", f"files in {folder}"]


PIPELINE = {
    "layout": {"ranks": 4, "stages": 4, "replicas": 1, "servers": 0},
    "schedule": "1f1b",
    "bubble_rate": {"formula": 0.158, "simulated": 0.1712, "measured": 0.21},
    "peak_in_flight": [4, 3, 2, 1],
    "weight_versions": [1, 1, 1, 1],
    "peak_activation_bytes": [1_600_000, None, 800_000, 400_000],
    "stages": [{"unsplit": []}] * 4,
}


def rows(**changes) -> dict[str, str]:
    """Of the table of a run through four stages, but for the ranks."""
    found = dict(table_rows({**PIPELINE, **changes}))
    assert found.pop("ranks").startswith("4: ")
    return found


def test_the_table_tells_of_the_pipeline():
    assert rows() == {
        "schedule": "1f1b",
        "bubble": "formula 15.8 %, simulated 17.1 %, measured 21.0 %",
        "in flight": "4 3 2 1",
        "activations": "0.4 to 1.6 MB",
    }


def test_one_stage_has_nothing_to_tell_of_a_pipeline():
    layout = {"ranks": 4, "stages": 1, "replicas": 4, "servers": 0}
    assert rows(layout=layout, schedule=None, bubble_rate=None, peak_in_flight=[1], weight_versions=[2]) == {}
    assert [label for label, _ in table_rows({**PIPELINE, "layout": None})] == []


def test_what_is_not_known_of_a_pipeline_has_no_row():
    assert "bubble" not in rows(bubble_rate=None)
    assert "bubble" not in rows(bubble_rate=dict.fromkeys(("formula", "simulated", "measured")))
    assert rows(bubble_rate={"formula": 0.0, "simulated": None})["bubble"] == "formula 0.0 %"
    assert "activations" not in rows(peak_activation_bytes=[None] * 4)
    nothing = dict.fromkeys(key for key in PIPELINE if key != "layout")
    assert rows(**nothing, trace=None) == {}
    assert rows(**{**nothing, "bubble_rate": {}, "peak_in_flight": [], "stages": [], "trace": {}}) == {}


def test_weight_versions_are_told_where_a_stage_keeps_more_than_one():
    assert rows(weight_versions=[4, 3, 2, 1])["weight versions"] == "4 3 2 1"


def test_gradients_that_were_not_put_off_are_told():
    stages = [{"unsplit": []}, {"unsplit": ["layers.1.weight", "layers.1.bias"]}, {}, {"unsplit": ["layers.7.scale"]}]
    assert rows(stages=stages)["not split"] == "layers.1.weight and 2 more"
    assert rows(stages=stages[2:])["not split"] == "layers.7.scale"


@pytest.mark.parametrize(
    "trace, text",
    [
        (
            {"hidden_share": 0.36, "clock_error": 0.0002, "dropped_events": 0},
            "36 % of transfers hidden, clocks to 0.2 ms",
        ),
        ({"hidden_share": None, "clock_error": 2e-6, "dropped_events": 0}, "clocks to 0.002 ms"),
        (
            {"hidden_share": 0.0, "clock_error": 0.0, "dropped_events": 3},
            "0 % of transfers hidden, clocks to 0 ms, 3 events left out",
        ),
    ],
)
def test_a_trace_has_a_row_in_any_layout(trace, text):
    assert rows(trace=trace)["trace"] == text
    assert dict(table_rows({"trace": trace})) == {"trace": text}


def test_rich_is_imported_by_what_draws_only():
    program = """
import io, sys
from hpctrain.report import console, metrics, summary
console.ProgressLine(5, io.StringIO()).update({"step": 1, "loss": 1.0, "seconds": 1.0, "rows_per_second": 1.0})
loaded = {name.partition(".")[0] for name in sys.modules}
sys.exit(str(loaded & {"rich", "torch", "mpi4py", "numpy"}) if loaded & {"rich", "torch", "mpi4py", "numpy"} else 0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("terminal", (False, True))
def test_an_evaluation_leaves_a_line_that_stays(terminal):
    stream = Stream(terminal)
    progress = ProgressLine(200, stream)
    progress.update(line(40))
    progress.evaluated({"step": 40, "eval": {"loss": 1.25, "accuracy": 0.5}, "seconds": 1.0})
    progress.update(line(41))
    progress.close()
    assert "step  40/200  held-out loss 1.2500  accuracy 0.5000\n" in stream.getvalue()
