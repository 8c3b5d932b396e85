"""What a task offers to training.

A task is a dataclass: its fields are the options of --task-option, so there is one list of options, with types and
defaults, and none in the parser. `load.py` builds one from the command line. Nothing here, nor in the module of a
built-in task, imports torch: a mistake on the command line is answered at once, before the heavy imports.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


class Task(Protocol):
    """What every task has; the first line of each member here is what an error says is missing.

    Numbers of items are whole, or fractions where items weigh differently. `dataset("eval")` may give None.

    A batch is what torch's default_collate makes of rows: inputs and targets may be tensors, or dicts, lists and tuples
    of tensors. A dict goes to the first layer, or to the module, as keyword arguments.

    Instead of `layers()` a task may have `module()` -> one torch.nn.Module, which no pipeline can cut. It may also have
    `metric(outputs, targets)` -> {name: (sum over items, number of items)}; without it the loss is the metric;
    `figures(means)` -> {name: value} shown in place of the means of the metrics over all rows, a root of one, say;
    `tables()` -> {name of an nn.Embedding's weight: hpctrain.Table}, whose rows live in tables of their own;
    `ties()` -> pairs of parameter names, `layers.0.weight`, that are one parameter;
    `prepare()`: heavy work on the data, done by one rank of each node before any other touches them;
    `baseline()` -> {metric name: value}, a yardstick that a trained model should beat;
    `sample(forward)` -> text or None, where forward maps inputs (batch, ...) to outputs;
    `data_sha256()` -> hex digest of the raw data; `data_stamp()` -> what changes when somebody changes the data.
    A field `data` (a path or None) receives --data; every other field of type int, float, bool or str is an option.
    """

    def layers(self) -> list[Callable[[], nn.Module]]:
        """a list of zero-argument factories of torch.nn.Module, applied in order (or module(): one torch.nn.Module)"""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """the SUM of the losses of all items (a scalar tensor), and the number of items"""

    def dataset(self, split: str) -> Any:
        """for "train" and "eval" a data set with __len__ and __getitem__, which gives (input, target) tensors"""


MEMBERS = {name: inspect.getdoc(member) for name, member in vars(Task).items() if not name.startswith("_")}


def check_task(task: Any) -> None:
    """Raises ValueError that names every missing member of a task and what it should be."""
    has = {name for name in (*MEMBERS, "module") if callable(getattr(task, name, None))}
    missing = [
        f"{name}({', '.join(list(inspect.signature(getattr(Task, name)).parameters)[1:])}): {meaning}"
        for name, meaning in MEMBERS.items()
        if name not in has and not (name == "layers" and "module" in has)
    ]
    if not dataclasses.is_dataclass(task):
        missing.insert(0, "@dataclass: the class is a dataclass, whose fields are its options")
    if missing:
        raise ValueError(f"--task: {type(task).__name__} is no task, it lacks " + "; ".join(missing))
    if {"layers", "module"} <= has:
        raise ValueError(f"--task: {type(task).__name__} has both layers() and module(); keep one")


def metric_of(task: Any) -> Callable[[Any, Any], dict[str, tuple[float, int]]]:
    """The task's own metric, or its loss as one."""
    return task.metric if hasattr(task, "metric") else lambda *batch: {"loss": task.loss(*batch)}


def figures_of(task: Any) -> Callable[[dict], dict]:
    """The task's own figures, or the means as they are."""
    return task.figures if hasattr(task, "figures") else dict


def check_option(option: str, value: float, holds: bool, wanted: str) -> None:
    """ValueError that names the option where it does not hold; `wanted` says what would."""
    if not holds:
        raise ValueError(f"--task-option {option}={value}: should be {wanted}")
