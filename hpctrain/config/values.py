"""Values of settings: what a field may hold, said once, and told in words where something else comes."""

import dataclasses
import math
import types
from dataclasses import field
from typing import Any, get_args

TASKS = ("text", "images", "ratings")  # the built-in ones
KIND_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "KEY = VALUE pairs",
    bool: "true or false",
}


class UsageError(ValueError):
    """Something the user asked for cannot be; the message is one line."""


def flag(default: Any, help: str, **rules) -> Any:
    """A field that is a flag: `minimum`, `above` (exclusive), `below` (exclusive), `infinite` (whether it may be),
    `choices`, `alias`, `metavar`, `adds_up` (given twice it has both, with a comma between).
    """
    kind = {"default_factory": dict} if default is dict else {"default": default}
    return field(**kind, metadata={"help": help, **rules})


def flag_name(each: dataclasses.Field) -> str:
    return "--" + each.name.replace("_", "-")


def check_task(name: str) -> None:
    """UsageError for what can name no task, wherever it is to run."""
    module, _, attribute = name.rpartition(":")
    if name not in TASKS and not (module and attribute):
        raise UsageError(
            f"--task {name}: there is no such task; choose {', '.join(TASKS)}, FILE.py:Name or package.module:Name"
        )


def check_value(name: str, value: Any, kind: Any, rules) -> None:
    """Raises UsageError where `value` is of another kind than the field or breaks one of its rules."""
    kinds = [k for k in (get_args(kind) if isinstance(kind, types.UnionType) else (kind,)) if k is not type(None)]
    accepted = (int, float) if kinds == [float] else tuple(kinds)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kinds != [bool]):
        raise UsageError(f"{name}: expected {describe(kinds[0], rules)}, got {value!r}")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UsageError(f"{name}: {ascii(value)} is not UTF-8; give it another name")
    if "choices" in rules and value not in rules["choices"]:
        raise UsageError(f"{name}: expected one of {', '.join(rules['choices'])}; got {value!r}")
    low, above, below = rules.get("minimum", -math.inf), rules.get("above", -math.inf), rules.get("below", math.inf)
    may_be = value == math.inf and rules.get("infinite", False)
    if isinstance(value, (int, float)) and not (
        may_be or value >= low and above < value < below and math.isfinite(value)
    ):
        raise UsageError(f"{name}: expected {describe(kinds[0], rules)}, got {value!r}")


def describe(kind: type, rules) -> str:
    """What a value may be, in words: `a whole number >= 1`."""
    words = KIND_WORDS[kind]
    bounds = [
        f"{sign} {rules[rule]}" for rule, sign in (("minimum", ">="), ("above", ">"), ("below", "<")) if rule in rules
    ]
    return " ".join([words, " and ".join(bounds)]).rstrip()
