"""A task is checked by name, member and option, and a mistake of the command line is answered without torch."""

import dataclasses
import subprocess
import sys

import pytest

from hpctrain.tasks import load
from hpctrain.tasks.load import build_task, settled_options
from hpctrain.tasks.protocol import check_task

OPTIONS = "layers=6, width=64, heads=2, context=64, dropout=0.0, tokenizer="


@dataclasses.dataclass
class Tiny:
    """Every kind of option, and no data of the user's own."""

    deep: bool = False
    rate: float = 0.5
    label: str = "a"

    def layers(self):
        return []

    def loss(self, outputs, targets):
        return outputs.sum(), 1

    def metric(self, outputs, targets):
        return {}

    def dataset(self, split):
        return []


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(load.BUILT_IN, "tiny", "tiny_task:Tiny")
    monkeypatch.setitem(sys.modules, "tiny_task", sys.modules[__name__])


def refusal(*args) -> str:
    with pytest.raises(ValueError) as caught:
        build_task(*args)
    return str(caught.value)


def test_options_are_converted_by_the_types_of_the_fields():
    task = build_task("text", {"layers": "3", "width": "16", "heads": "4", "dropout": "0.25", "context": "32"})
    assert (task.num_layers, task.width, task.num_heads, task.context, task.dropout) == (3, 16, 4, 32, 0.25)


def test_options_left_out_keep_their_defaults():
    shown = ", ".join(f"{key}={value}" for key, value in settled_options("text", {}).items())
    assert shown == OPTIONS


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("Yes", True), ("1", True), ("false", False), ("no", False), ("0", False)]
)
def test_truth_is_read_from_words_not_from_the_length_of_the_text(tiny, text, value):
    assert build_task("tiny", {"deep": text}) == Tiny(deep=value, rate=0.5, label="a")


def test_an_unknown_task_lists_those_there_are():
    assert refusal("txet", {}) == (
        "--task txet: there is no such task; choose text, images, ratings, FILE.py:Name or package.module:Name"
    )


def test_an_unknown_option_lists_those_there_are():
    assert refusal("text", {"depth": "2"}) == f"--task-option depth: task text has no such option; it has {OPTIONS}"


@pytest.mark.parametrize("key", ["num_layers", "data"])
def test_a_field_that_is_no_option_is_unknown(key):
    assert refusal("text", {key: "2"}).startswith(f"--task-option {key}: task text has no such option")


@pytest.mark.parametrize(
    ("name", "key", "text", "kind"),
    [
        ("text", "layers", "2.5", "a whole number"),
        ("text", "dropout", "half", "a number"),
        ("tiny", "deep", "maybe", "true or false"),
    ],
)
def test_a_value_that_does_not_convert_names_its_option(tiny, name, key, text, kind):
    assert refusal(name, {key: text}) == f"--task-option {key}={text}: not {kind}"


def test_a_task_without_data_of_the_users_own_refuses_it(tiny):
    assert refusal("tiny", {}, "x") == "--data x: task tiny reads no data of your own; leave --data out"


def test_check_task_names_each_missing_member_and_what_it_should_be():
    class Half:
        def layers(self):
            return []

        loss = "not callable"

        def dataset(self, split):
            return []

    with pytest.raises(ValueError) as caught:
        check_task(Half())
    assert str(caught.value) == (
        "--task: Half is no task, it lacks @dataclass: the class is a dataclass, whose fields are its options; "
        "loss(outputs, targets): the SUM of the losses of all items (a scalar tensor), and the number of items"
    )


def test_check_task_accepts_a_whole_task():
    check_task(Tiny())


def test_options_are_checked_without_torch():
    program = """
import sys
from hpctrain.tasks.load import build_task
build_task("text", {"layers": "2"})
for name, options, data in (("text", {"layers": "0"}, None), ("text", {}, "/no/such"), ("none", {}, None)):
    try:
        build_task(name, options, data)
    except ValueError:
        continue
    sys.exit(f"accepted {name} {options} {data}")
sys.exit("torch" if any(m.partition(".")[0] in ("torch", "mpi4py") for m in sys.modules) else 0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
