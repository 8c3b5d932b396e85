"""A task in a file or package of the user's own: found, its options read by type, its mistakes told in one line."""

import subprocess
import sys

import pytest

from hpctrain.tasks.load import absolute_name, build_task, explained, open_dataset, settled_options, short_name

TASK = """
from __future__ import annotations
from dataclasses import dataclass, field
from neighbour import NUM_ROWS

@dataclass
class Mine:
    path: str
    width: int = 4
    rate: float | None = None
    names: list = field(default_factory=list)
    deep: bool = False
    note: "str | None" = "n"
    data: str | None = None

    def module(self):
        return None

    def loss(self, outputs, targets):
        return outputs.sum(), 1

    def dataset(self, split):
        return list(range(NUM_ROWS))

class Other:
    pass
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "neighbour.py").write_text("NUM_ROWS = 3\n")
    yield str(tmp_path / "mine.py")
    sys.modules.pop("neighbour", None)


def refusal(*args) -> str:
    with pytest.raises(ValueError) as caught:
        build_task(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_a_task_with_options_of_its_fields(file):
    task = build_task(f"{file}:Mine", {"path": "x", "width": "8", "rate": "0.5", "deep": "yes"}, "rows.csv")
    assert (task.path, task.width, task.rate, task.deep, task.data, task.names) == ("x", 8, 0.5, True, "rows.csv", [])
    settled = settled_options(f"{file}:Mine", {"path": "x", "width": "8", "rate": "0.5", "deep": "yes"})
    assert settled == {"path": "x", "width": "8", "rate": "0.5", "deep": "yes", "note": "n"}
    assert build_task(f"{file}:Mine", settled, "rows.csv") == task, "options survive as texts"
    assert build_task(f"{file}:Mine", {"path": "x", "rate": "none", "note": "None"}).note is None
    assert open_dataset(f"{file}:Mine", {"path": "x"}, None, "train") == [0, 1, 2]


def test_a_package_is_found_from_the_current_folder(file, tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "a_package" / "inside.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert build_task("a_package.inside:Mine", {"path": "x"}).width == 4


def test_the_same_file_is_loaded_once_and_hides_no_other_module(tmp_path):
    (tmp_path / "random.py").write_text(TASK.replace("from neighbour import NUM_ROWS", "NUM_ROWS = 1"))
    first = build_task(f"{tmp_path}/random.py:Mine", {"path": "x"})
    assert type(first) is type(build_task(f"{tmp_path}/random.py:Mine", {"path": "y"}))
    assert sys.modules["random"].__file__ != f"{tmp_path}/random.py"


@pytest.mark.parametrize(
    "change, name, words",
    [
        (("", ""), "nowhere.py:Mine", "--task {}nowhere.py:Mine: no such file"),
        (("", ""), "mine.py:Nine", "has no class Nine; it has Mine, Other"),
        (("", ""), "mine.py:Other", "write @dataclass above the class"),
        (("    width", "    width = = 3\n    width"), "mine.py:Mine", "SyntaxError: invalid syntax (mine.py, line 9)"),
        (
            ("from neighbour", "from nebula"),
            "mine.py:Mine",
            "ModuleNotFoundError: No module named 'nebula' (mine.py, line 4)",
        ),
        (
            ("@dataclass\n", "1 / 0\n@dataclass\n"),
            "mine.py:Mine",
            "ZeroDivisionError: division by zero (mine.py, line 6)",
        ),
        (("@dataclass\n", "raise SystemExit('no')\n@dataclass\n"), "mine.py:Mine", "SystemExit: no (mine.py, line 6)"),
        (
            ("rate: float", "rate: Float"),
            "mine.py:Mine",
            "the type of a field cannot be found: name 'Float' is not defined",
        ),
        (("def loss", "def lost"), "mine.py:Mine", "Mine is no task, it lacks loss(outputs, targets): the SUM"),
        (
            ("def module", "def layers(self): return []\n    def module"),
            "mine.py:Mine",
            "has both layers() and module(); keep one",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place(file, tmp_path, change, name, words):
    (tmp_path / "mine.py").write_text(TASK.replace(*change))
    assert words.format(f"{tmp_path}/") in refusal(f"{tmp_path}/{name}", {"path": "x"})


def test_options_that_cannot_be_are_told(file):
    assert refusal(f"{file}:Mine", {}) == f"--task-option path: task {file}:Mine needs it, there is no default"
    assert refusal(f"{file}:Mine", {"path": "x", "width": "wide"}) == "--task-option width=wide: not a whole number"
    told = refusal(f"{file}:Mine", {"path": "x", "names": "a"})
    assert told.endswith("has no such option; it has path=..., width=4, rate=none, deep=false, note=n")
    assert refusal("no_such_package.tasks:Mine", {}).startswith(
        "--task no_such_package.tasks:Mine: ModuleNotFoundError: No"
    )
    assert refusal("mine.py", {}).startswith(
        "--task mine.py: there is no such task; choose text, images, ratings, FILE.py:Name or"
    )


def test_settled_options_are_those_given_not_what_a_task_made_of_them(tmp_path):
    text = TASK.replace("    def module", "    def __post_init__(self): self.width *= 2\n    def module")
    (tmp_path / "mine.py").write_text(text.replace("from neighbour import NUM_ROWS", "NUM_ROWS = 1"))
    name = f"{tmp_path}/mine.py:Mine"
    settled = settled_options(name, {"path": "x"})
    assert settled["width"] == "4" and build_task(name, settled).width == build_task(name, {"path": "x"}).width == 8


def test_a_field_that_no_option_can_set_needs_a_default(tmp_path):
    (tmp_path / "mine.py").write_text(
        TASK.replace("path: str", "sizes: list").replace("from neighbour import NUM_ROWS", "")
    )
    assert refusal(f"{tmp_path}/mine.py:Mine", {}).endswith("no option can set field sizes; give it a default")


def test_an_error_of_the_users_code_keeps_its_place(file):
    try:
        int("x7")
    except ValueError as error:
        told = explained(f"{file}:Mine", error)
        assert told.startswith(
            f"--task {file}:Mine: ValueError: invalid literal for int() with base 10: 'x7' (test_load.py, line"
        )
        assert explained("text", error) == "invalid literal for int() with base 10: 'x7'"
    assert explained(f"{file}:Mine", ValueError("--data x: no such file")) == "--data x: no such file"


def test_a_data_set_is_made_once(file):
    task = build_task(f"{file}:Mine", {"path": "x"})
    assert task.dataset("train") is task.dataset("train") is not task.dataset("eval")


def test_names_for_configuration_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_name("a/b.py:C") == f"{tmp_path}/a/b.py:C"
    assert absolute_name("text") == "text" and absolute_name("a.b:C") == "a.b:C"
    assert [short_name(name) for name in ("text", "a/b.py:C", "a.b:D")] == ["text", "C", "D"]


def test_a_task_without_a_metric_has_its_loss_as_one(file):
    from hpctrain.tasks.protocol import metric_of

    class Outputs:
        def sum(self):
            return 5.0

    task = build_task(f"{file}:Mine", {"path": "x"})
    assert metric_of(task)(Outputs(), None) == {"loss": (5.0, 1)}


def test_a_built_in_task_loads_no_torch():
    program = (
        "import sys\nfrom hpctrain.tasks.load import build_task\nbuild_task('text', {})\nprint('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "False\n"
