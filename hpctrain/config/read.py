"""Settings from the command line and from a file: flags win over the file, the file over the defaults."""

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from hpctrain.config.settings import Config
from hpctrain.config.values import UsageError, check_value, describe, flag_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ONE_OF = (("steps", "epochs"), ("num_microbatches", "micro_batch_size"))  # two ways to say the same


class Parser(argparse.ArgumentParser):
    """argparse, with errors as exceptions and a word on what was probably meant."""

    def error(self, message):
        raise UsageError(message.removeprefix("argument "))

    def parse(self, argv: list[str]) -> dict[str, Any]:
        known, unknown = self.parse_known_args(argv)
        if unknown:
            names = [name for action in self._actions for name in action.option_strings]
            name = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the flags"
            raise UsageError(f"{unknown[0]}: no such flag; {hint}")
        return vars(known)


def parser() -> argparse.ArgumentParser:
    """The command line of `train`: one flag for each field of Config, and --config."""
    top = Parser("hpctrain", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    top.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings; flags win over it")
    for each in dataclasses.fields(Config):
        names = [flag_name(each)] + ([each.metadata["alias"]] if "alias" in each.metadata else [])
        if each.type is bool:
            switch = argparse.BooleanOptionalAction
            top.add_argument(*names, dest=each.name, action=switch, help=each.metadata["help"])
            continue
        metavar = each.metadata.get("metavar") or "|".join(each.metadata["choices"])
        text = each.metadata["help"] + ("" if each.default in (None, dataclasses.MISSING) else f" ({each.default})")
        action = "append" if each.type is dict or "adds_up" in each.metadata else "store"
        top.add_argument(*names, dest=each.name, metavar=metavar, action=action, help=text.replace("%", "%%"))
    return top


def parse(argv: list[str], saved: Mapping[str, Any] | None = None) -> tuple[Config, set[str]]:
    """The configuration that `argv` (and the file it names) asks for, and the names of the fields that `argv` gave.

    `saved`: values that take the place of the defaults, as a run that goes on has them. A size of buckets that stands
    in the file beside a tuning counts as given: it was meant to win over the tuning.
    """
    texts = parser().parse(argv)
    path = texts.pop("config", None)
    told = read_toml(path) if path is not None else {}
    for pair in ONE_OF:
        if set(pair) <= texts.keys() or set(pair) <= told.keys():
            one, other = ("--" + name.replace("_", "-") for name in pair)
            raise UsageError(f"{other}: give it or {one}, not both")
    fields = {each.name: each for each in dataclasses.fields(Config)}
    given = {
        name: _key_values(text) if fields[name].type is dict else _convert(fields[name], text)
        for name, text in texts.items()
    }
    beside = told.keys() & {"bucket_bytes"} if "tuning" in told and "tuning" not in texts else set()
    settings = dict(saved or {})
    for layer in (told, given):
        settings = _over(layer, settings, fields)
    return Config(**settings), texts.keys() | beside


def _over(layer: Mapping[str, Any], settings: Mapping[str, Any], fields: Mapping) -> dict[str, Any]:
    """`settings` where the layer says nothing; of two ways to say the same, its own counts."""
    said_otherwise = {name for pair in ONE_OF if set(pair) & layer.keys() for name in pair}
    merged = {name: value for name, value in settings.items() if name not in said_otherwise}
    for name, value in layer.items():
        merged[name] = {**merged.get(name, {}), **value} if fields[name].type is dict else value
    return merged


def read_toml(path: str) -> dict[str, Any]:
    """Settings from a file; keys are flags without their dashes, `[task_option]` a table."""
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path}: {getattr(error, 'strerror', None) or error}") from None
    settings = {key.replace("-", "_"): value for key, value in settings.items()}
    fields = {each.name: each for each in dataclasses.fields(Config)}
    for key, value in settings.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, 1) or sorted(fields)
            raise UsageError(f"--config {path}: no setting is called {key!r}; there is {', '.join(close)}")
        try:
            check_value(key, value, fields[key].type, fields[key].metadata)
        except UsageError as error:
            raise UsageError(f"--config {path}: {error}") from None
    if "task_option" in settings:
        settings["task_option"] = {key: _text(value) for key, value in settings["task_option"].items()}
    return settings


def to_toml(config: Config) -> str:
    """The settings as a file that `--config` reads; those that are None are left out."""
    import tomli_w

    values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    return tomli_w.dumps(values)


def _convert(each: dataclasses.Field, text: Any) -> Any:
    if each.type is bool:
        return text  # argparse's own True or False
    if "adds_up" in each.metadata:
        text = ",".join(text)
    if text == "none" and each.type is not str:
        return each.default  # takes back what the file says
    kind = next(k for k in (get_args(each.type) or (each.type,)) if k is not type(None))
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{flag_name(each)}: expected {describe(kind, each.metadata)}, got {text!r}") from None


def _key_values(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for key, sign, _ in pairs:
        if not key or not sign:
            raise UsageError(f"--task-option: expected KEY=VALUE, such as layers=4; got {key!r}")
    return {key: value for key, _, value in pairs}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
