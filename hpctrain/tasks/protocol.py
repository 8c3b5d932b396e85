"""What a task offers to training, and how the command line builds one.

A task is a dataclass: its fields are the options of --task-option, so there is one list of options, with types and
defaults, and none in the parser. Nothing here, nor in the module of a built-in task, imports torch: a mistake on the
command line is answered at once, before the heavy imports.
"""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

BUILT_IN = {"text": "hpctrain.tasks.text:Text"}
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Task(Protocol):
    """What every task has; the first line of each member here is what an error says is missing.

    A task may also have `baseline()` -> {metric name: value}, a yardstick that a trained model should beat;
    `sample(forward)` -> text, where forward maps inputs (batch, ...) to outputs; `data_sha256()` -> hex digest of the
    raw data. A field `data` (a path or None) receives --data; every other field is an option.
    """

    def layers(self) -> list[Callable[[], nn.Module]]:
        """a list of zero-argument factories of torch.nn.Module, applied in order"""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """the SUM of the losses of all items (a scalar tensor), and the number of items"""

    def metric(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        """a dict of name: (sum over items, number of items)"""

    def dataset(self, split: str) -> Any:
        """for "train" and "eval" a data set with __len__ and __getitem__, which gives (input, target) tensors"""


MEMBERS = {name: inspect.getdoc(member) for name, member in vars(Task).items() if not name.startswith("_")}


def check_task(task: Any) -> None:
    """Raises ValueError that names every missing member of a task and what it should be."""
    missing = [
        f"{name}({', '.join(list(inspect.signature(getattr(Task, name)).parameters)[1:])}): {meaning}"
        for name, meaning in MEMBERS.items()
        if not callable(getattr(task, name, None))
    ]
    if not dataclasses.is_dataclass(task):
        missing.insert(0, "@dataclass: the class is a dataclass, whose fields are its options")
    if missing:
        raise ValueError(f"--task: {type(task).__name__} is no task, it lacks " + "; ".join(missing))


def build_task(name: str, options: dict[str, str], data: str | None = None) -> Any:
    """The task `name`, its fields set from `options` (texts by option name) and its data read.

    ValueError names the flag: --task, --task-option KEY or --data.
    """
    task_class = _task_class(name)
    fields = _option_fields(task_class)
    for key in options:
        if key not in fields:
            known = ", ".join(f"{option}={_shown(each.default)}" for option, each in fields.items())
            raise ValueError(f"--task-option {key}: task {name} has no such option; it has {known}")
    kinds = get_type_hints(task_class)
    values = {fields[key].name: _convert(key, text, kinds[fields[key].name]) for key, text in options.items()}
    if data is not None:
        if "data" not in kinds:
            raise ValueError(f"--data {data}: task {name} reads no data of your own; leave --data out")
        values["data"] = data
    task = task_class(**values)
    check_task(task)
    return task


def task_options(task: Any) -> dict[str, Any]:
    """The resolved options by option name, as a dict of int, float, bool and str."""
    return {option: getattr(task, each.name) for option, each in _option_fields(type(task)).items()}


def _task_class(name: str) -> type:
    if name not in BUILT_IN:
        raise ValueError(f"--task {name}: there is no such task; choose one of: {', '.join(BUILT_IN)}")
    module, _, attribute = BUILT_IN[name].partition(":")
    return getattr(import_module(module), attribute)


def _option_fields(task_class: type) -> dict[str, dataclasses.Field]:
    """Fields by option name: metadata["option"] where a method has the field's natural name, as `layers` has."""
    fields = dataclasses.fields(task_class)
    return {each.metadata.get("option", each.name): each for each in fields if each.name != "data"}


def _convert(key: str, text: str, kind: type) -> Any:
    try:
        return TRUTH[text.strip().lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"--task-option {key}={text}: not {KINDS[kind]}") from None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
