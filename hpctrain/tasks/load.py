"""From a name and options in text to a task: a built-in one, or a class in a file or package of the user's own."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
import types
import zlib
from contextlib import suppress
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hpctrain.config.values import check_task as check_name
from hpctrain.tasks.protocol import check_task

BUILT_IN = {
    "text": "hpctrain.tasks.text:Text",
    "images": "hpctrain.tasks.images:Images",
    "ratings": "hpctrain.tasks.ratings:Ratings",
}
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
NONE = "none"  # the text that stands for None where a field may be None


def build_task(name: str, options: dict[str, str], data: str | None = None) -> Any:
    """The task `name`, its fields set from `options` (texts by option name) and its data found.

    `name`: of a built-in task, FILE.py:Name or package.module:Name. ValueError names the flag: --task,
    --task-option KEY or --data.
    """
    task_class = _task_class(name)
    kinds = _hints(name, task_class)
    fields = _option_fields(task_class, kinds)
    for key in options:
        if key not in fields:
            known = ", ".join(f"{option}={_shown(each.default)}" for option, each in fields.items())
            raise ValueError(f"--task-option {key}: task {name} has no such option; it has {known or 'none'}")
    values = {fields[key].name: _convert(key, text, kinds[fields[key].name]) for key, text in options.items()}
    if data is not None:
        if "data" not in kinds:
            raise ValueError(f"--data {data}: task {name} reads no data of your own; leave --data out")
        values["data"] = data
    _check_given(name, task_class, fields, values)
    task = task_class(**values)
    check_task(task)
    with suppress(AttributeError):  # a class with slots
        object.__setattr__(task, "dataset", cache(task.dataset))  # made once, however often it is asked for
    return task


def open_dataset(name: str, options: dict[str, str], data: str | None, split: str) -> Any:
    """The data set of a task built from its texts, for a process that has nothing else."""
    return build_task(name, options, data).dataset(split)


def settled_options(name: str, options: dict[str, str]) -> dict[str, str]:
    """The options of a task as texts that `build_task` takes: those given, and defaults that a text can stand for."""
    task_class = _task_class(name)
    kinds = _hints(name, task_class)
    settled = {}
    for option, each in _option_fields(task_class, kinds).items():
        kind, optional = _kind(kinds[each.name])
        if option in options:
            settled[option] = options[option]
        elif isinstance(each.default, kind) or (each.default is None and optional):
            settled[option] = _shown(each.default)
    return settled


def explained(name: str, error: Exception) -> str:
    """An error of building or preparing a task as one line: our own as it is, one of the user's code with its place."""
    if name in BUILT_IN or str(error).startswith("--"):
        return str(error)
    return f"--task {name}: {_told(error)}"


def absolute_name(name: str) -> str:
    """`name` as it works from any folder."""
    file, _, attribute = name.rpartition(":")
    return f"{os.path.abspath(file)}:{attribute}" if file.endswith(".py") else name


def short_name(name: str) -> str:
    """For folders and tables: `text`, or the class of FILE.py:Name."""
    return name.rpartition(":")[2]


def _task_class(name: str) -> type:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    check_name(name)
    module, _, attribute = name.rpartition(":")
    try:
        loaded = _load_file(Path(module)) if module.endswith(".py") else _import(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--task {name}: {_told(error)}") from error
    task_class = getattr(loaded, attribute, None)
    if not isinstance(task_class, type):
        classes = [key for key, value in vars(loaded).items() if isinstance(value, type) and not key.startswith("_")]
        raise ValueError(f"--task {name}: {module} has no class {attribute}; it has {', '.join(classes) or 'none'}")
    return task_class


def _import(module: str) -> types.ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it, for the console script too
    return import_module(module)


def _load_file(path: Path) -> types.ModuleType:
    """The module in a file, loaded once, under a name that hides no other; it may import what lies beside it."""
    path = path.absolute()
    name = f"hpctrain_task_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError("no such file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = util.spec_from_file_location(name, path)
    module = sys.modules[name] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(error: BaseException) -> str:
    """An error of the user's file in one line, with its place."""
    if isinstance(error, FileNotFoundError) and not error.filename:
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
    place = "" if "importlib" in str(file) else f" ({Path(str(file)).name}, line {line})"
    return " ".join(f"{type(error).__name__}: {getattr(error, 'msg', None) or error}{place}".split())


def _hints(name: str, task_class: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(task_class):
        raise ValueError(f"--task {name}: write @dataclass above the class; its fields are the options of the task")
    try:
        return get_type_hints(task_class)
    except NameError as error:
        raise ValueError(f"--task {name}: the type of a field cannot be found: {error}") from None


def _option_fields(task_class: type, kinds: dict[str, Any]) -> dict[str, dataclasses.Field]:
    """Fields by option name: metadata["option"] where a method has the field's natural name, as `layers` has."""
    fields = [each for each in dataclasses.fields(task_class) if each.init and each.name != "data"]
    return {each.metadata.get("option", each.name): each for each in fields if _kind(kinds[each.name])[0] in KINDS}


def _check_given(name: str, task_class: type, fields: dict, values: dict[str, Any]) -> None:
    """ValueError for a field without default that nobody set."""
    for each in dataclasses.fields(task_class):
        without = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if each.init and without and each.name not in values:
            option = each.metadata.get("option", each.name)
            if each.name != "data" and option not in fields:
                raise ValueError(f"--task {name}: no option can set field {each.name}; give it a default")
            flag = "--data" if each.name == "data" else f"--task-option {option}"
            raise ValueError(f"{flag}: task {name} needs it, there is no default")


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of a field, and whether it may be None."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [each for each in get_args(hint) if each is not type(None)]
        return (inner[0] if len(inner) == 1 else None), len(inner) < len(get_args(hint))
    return hint, False


def _convert(key: str, text: str, hint: Any) -> Any:
    kind, optional = _kind(hint)
    if optional and text.strip().lower() == NONE:
        return None
    try:
        return TRUTH[text.strip().lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"--task-option {key}={text}: not {KINDS[kind]}") from None


def _shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "..."
    return {True: "true", False: "false", None: NONE}[value] if value is None or isinstance(value, bool) else str(value)
