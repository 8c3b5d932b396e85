"""The report of a run: what its page and its picture hold, and one line for what cannot be."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from hpctrain.plan.simulate import Times, simulate
from hpctrain.report.figures import MAX_BOXES, losses, shown, timeline_figure
from hpctrain.report.trace import Event, RankTrace, chrome
from hpctrain.tools import report

SUMMARY = {
    "task": "text",
    "schedule": "1f1b",
    "layout": {"stages": 3, "replicas": 1, "servers": 0, "ranks": 3},
    "steps": 30,
    "eval": {"loss": 1.25},
    "bubble_rate": {"formula": 0.25, "simulated": 0.3125, "measured": None},
    "peak_in_flight": [3, 2, 1],
    "weight_versions": [1, 1, 1],
    "peak_activation_bytes": [9_500_000, 6_500_000, 3_500_000],
    "stages": [{"layers": [pair], "parameters": n} for pair, n in (([0, 1], 123_456), ([2, 2], 7), ([3, 5], 8))],
}
LINES = [
    {"step": step, "loss": None if step == 7 else 4.0 - step / 10, "seconds": 0.1, "rows_per_second": 10.0}
    for step in range(1, 31)
] + [{"step": 15, "eval": {"loss": 2.75, "accuracy": 0.5}, "seconds": 0.1}]
STAGES = 3


def recorded(num_steps=4, pieces=6) -> list[RankTrace]:
    """Dry runs of 1F1B, step after step, what goes before a computation as waiting and after it as communication."""
    timeline = simulate("1f1b", STAGES, pieces, Times.alike(STAGES, 0.01, 0.02))
    traces = [RankTrace(stage, stage, 0, 3.0 * stage, 2e-6, []) for stage in range(STAGES)]
    for trace, spans in zip(traces, timeline.spans):
        for step in range(num_steps):
            now = at = step * (timeline.makespan + 0.01) - trace.offset
            for action, start, end in spans:
                trace.events.append(Event("waiting", f"RECV_{action}", now, at + start, step))
                now = at + end
                trace.events.append(Event("compute", str(action), at + start, now, step))
                trace.events.append(Event("communication", f"SEND_{action}", now, now + 0.001, step))
            trace.events.append(Event("compute", "STEP", now, now + 0.002, step))
    return traces


@pytest.fixture
def make_run(tmp_path):
    """Writes a run's folder; what is None is left out. Text is written as it is, all else as JSON."""

    def make(name="text-20300101-120000", metrics=LINES, summary=SUMMARY, trace=None, config='task = "text"\n'):
        folder = tmp_path / name
        folder.mkdir()
        lines = "".join(json.dumps(line) + "\n" for line in metrics) if isinstance(metrics, list) else metrics
        files = {"metrics.jsonl": lines, "summary.json": summary, "trace.json": trace, "config.toml": config}
        for place, content in files.items():
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (folder / place).write_text(text, encoding="latin-1")
        return folder

    return make


class Page(HTMLParser):
    """The page's text, its elements and their attributes; AssertionError where elements do not close in order."""

    def __init__(self, html):
        super().__init__()
        self.text, self.tags, self.attributes, self._open = "", [], [], []
        self.feed(html)
        self.close()
        self.text = " ".join(self.text.split())
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += f"{data} "


def read_page(folder) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def picture_size(folder) -> tuple[int, int]:
    content = (folder / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_the_page_tells_of_bubbles_stages_time_and_configuration(make_run, capsys):
    folder = make_run(trace=chrome(recorded()), config="# stages x replicas: 3 x 1\n")
    assert report.run([str(folder)], None) == 0
    assert capsys.readouterr().out == f"report in {folder / 'report.html'} and {folder / 'report.png'}\n"
    page = read_page(folder)
    assert "text-20300101-120000 text, schedule 1f1b" in page.text and "3: 3 stages x 1 replica" in page.text
    assert re.search(r"formula 25\.0 % .* simulated 31\.2 % .* measured 25\.0 % ", page.text)
    assert "0 0 to 1 123,456 3 1 9.5 MB 1 2 7 2 1 6.5 MB 2 3 to 5 8 1 1 3.5 MB" in page.text
    assert "agree to within 2.0 microseconds" in page.text and "# stages x replicas: 3 x 1" in page.text
    assert page.tags.count("svg") == 2 and picture_size(folder)[1] > picture_size(folder)[0] / 2


def test_the_page_needs_nothing_from_outside_and_its_ids_are_its_own(make_run):
    folder = make_run(trace=chrome(recorded()))
    assert report.run([str(folder)], None) == 0
    page, html = read_page(folder), (folder / "report.html").read_text(encoding="utf-8")
    assert not {"script", "link", "img", "iframe", "image"} & set(page.tags)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 10
    links = [value for name, value in page.attributes if name in ("href", "xlink:href", "src")]
    links += [f"#{place}" for place in re.findall(r"url\(#([^)]*)\)", html)]
    assert links and {link.removeprefix("#") for link in links} <= set(ids)
    assert html.count("url(") == html.count("url(#") and "@import" not in html


def test_a_report_is_the_same_twice(make_run, tmp_path):
    folder = make_run(trace=chrome(recorded()))
    pages = []
    for out in (tmp_path / "new" / "one", tmp_path / "two"):
        assert report.run([str(folder), "--out", str(out)], None) == 0
        pages.append([(out / name).read_bytes() for name in ("report.html", "report.png")])
    assert pages[0] == pages[1] and not (folder / "report.html").exists()


def test_without_a_trace_there_is_no_timeline(make_run):
    folder = make_run()
    assert report.run([str(folder)], None) == 0
    page = read_page(folder)
    assert page.tags.count("svg") == 1 and "measured \u2013" in page.text
    assert picture_size(folder)[1] < picture_size(folder)[0] / 2
    for empty in ([], [RankTrace(0, 0, 0, 0.0, 0.0, [])]):
        (folder / "trace.json").write_text(json.dumps(chrome(empty)))
        assert report.run([str(folder)], None) == 0


def test_an_unfinished_run_has_its_losses_so_far(make_run, capsys):
    folder = make_run(summary=None, metrics=LINES[:5], config=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert report.run([str(folder)], None) == 0
    assert capsys.readouterr().out.startswith("the run has not finished: no summary.json yet, 5 steps so far\n")
    page = read_page(folder)
    assert "Unfinished: no summary.json yet; 5 steps so far." in page.text and page.tags.count("svg") == 1


@pytest.mark.parametrize("summary", [{}, dict.fromkeys(SUMMARY)])
def test_a_summary_without_figures_has_no_tables_of_them(make_run, summary):
    folder = make_run(summary=summary)
    assert report.run([str(folder)], None) == 0
    assert not {"Bubble", "Stages"} & set(read_page(folder).text.split())


def test_names_and_settings_are_escaped(make_run):
    name = "<script>&$x^$\"'"
    folder = make_run(name, config='task = "</pre><script>alert(1)</script>"\n', summary={**SUMMARY, "task": "<i>"})
    assert report.run([str(folder)], None) == 0
    assert not {"script", "i"} & set((page := read_page(folder)).tags)
    assert name in page.text and "</pre><script>alert(1)</script>" in page.text


@pytest.mark.parametrize(
    "files, what",
    [
        ({"metrics": None}, "no run's folder, it has no metrics.jsonl"),
        ({"metrics": ""}, "metrics.jsonl: no step is in it yet"),
        ({"metrics": '{"step": 1, "loss": 1}\nstep 2\n'}, "metrics.jsonl, line 2: not JSON"),
        ({"metrics": [{"step": 1, "loss": "low"}]}, "metrics.jsonl, line 1: no metrics of a step"),
        ({"metrics": [{"step": 1, "eval": 3}]}, "metrics.jsonl, line 1: no metrics of a step"),
        ({"metrics": [[1]]}, "metrics.jsonl, line 1: no metrics of a step"),
        ({"summary": "{"}, "summary.json: not JSON"),
        ({"summary": [3]}, "summary.json: no summary of a run"),
        ({"trace": "\xff"}, "trace.json: no trace that hpctrain wrote"),
        ({"trace": {"traceEvents": []}}, "trace.json: no trace that hpctrain wrote, 'otherData' is missing"),
    ],
)
def test_what_cannot_be_reported_is_told_in_one_line(make_run, capsys, files, what):
    folder = make_run(**files)
    assert report.run([str(folder)], None) == 2
    told = capsys.readouterr().err
    assert told.startswith("hpctrain: ") and what in told and told.count("\n") == 1
    assert not (folder / "report.png").exists()


@pytest.mark.parametrize(
    "argv, what",
    [
        ([], "the following arguments are required: RUN"),
        (["nowhere"], "nowhere: no such folder; name that of a run, such as runs/text-"),
        (["RUN", "--outt", "x"], "--outt: no such flag; did you mean --out?"),
        (["RUN", "--out", "RUN/metrics.jsonl"], "metrics.jsonl: File exists"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(make_run, capsys, argv, what):
    folder = make_run()
    assert report.run([each.replace("RUN", str(folder)) for each in argv], None) == 2
    assert what in (told := capsys.readouterr().err) and told.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(make_run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.run([str(make_run())], None) == 2
    assert capsys.readouterr().err.endswith('needs the package matplotlib; pip install "hpctrain[report]"\n')


def test_a_curve_has_each_step_once_and_gaps_where_steps_were_skipped():
    training, held_out = losses([*LINES, {"step": 2, "loss": 9.0}, {"step": 3, "stopped_early": "loss no better"}])
    assert [step for step, _ in training] == list(range(1, 31)) and training[1] == (2, 9.0)
    assert [step for step, loss in training if loss != loss] == [7] and held_out == [(15, 2.75)]


@pytest.mark.parametrize(
    "num_steps, pieces, steps", [(1, 6, [0]), (4, 6, [2, 3]), (9, 4, [4, 5, 6]), (9, 12, [4, 5]), (3, 40, [1])]
)
def test_a_timeline_shows_so_many_steps_that_their_numbers_have_room(num_steps, pieces, steps):
    traces = recorded(num_steps, pieces)
    found, start, _ = shown(traces)
    assert found == steps
    assert start == min(event.start for trace in traces for event in trace.aligned() if event.step == steps[0])
    numbers = [text.get_text() for text in timeline_figure(traces).axes[0].texts]
    assert len(numbers) >= STAGES * min(MAX_BOXES, 2 * pieces * len(steps)) * 0.9
    assert set(numbers) <= {str(number) for number in range(pieces)}


def test_a_timeline_names_its_rows_and_explains_its_colours():
    axes = timeline_figure(recorded()).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {r}, stage {r}" for r in range(STAGES)]
    explained = [text.get_text() for text in axes.get_legend().get_texts()]
    assert explained == ["forward", "backward", "update", "waiting", "sending, summing"]


def test_drawing_needs_neither_torch_nor_a_screen(make_run):
    folder = make_run(trace=chrome(recorded()))
    program = "import sys; from hpctrain.tools import report; code = report.run(sys.argv[1:], None); "
    program += "print(code, *({'torch', 'mpi4py', 'matplotlib.pyplot'} & sys.modules.keys()))"
    command = [sys.executable, "-c", program, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.stdout.splitlines()[-1:], ended.returncode) == (["0"], 0), ended.stderr
