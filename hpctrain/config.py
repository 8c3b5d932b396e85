"""Everything a run can be told: one dataclass, seen as command line and as TOML.

Flags win over the file, the file over the defaults. All validation is here; an error is one line that names the flag
or the key and what would work. Standard library only (and tomli where Python has no tomllib): `--help` and every
mistake answer at once.
"""

import argparse
import dataclasses
import difflib
import math
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
PRECISIONS = ("float32", "float64", "bf16-mixed")
LR_SCHEDULES = ("constant", "linear", "cosine")
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
    """A field that is a flag: `minimum`, `above` (exclusive), `below` (exclusive), `choices`, `alias`, `metavar`."""
    kind = {"default_factory": dict} if default is dict else {"default": default}
    return field(**kind, metadata={"help": help, **rules})


@dataclass(frozen=True)
class Config:
    """A training run. Raises UsageError for a value out of range."""

    task: str = flag("text", "what to train: text, images, FILE.py:Name or package.module:Name", metavar="NAME")
    task_option: dict = flag(dict, "a setting of the task, such as layers=4; may be repeated", metavar="KEY=VALUE")
    data: str | None = flag(
        None, "a file or folder of your own; without it the task's built-in real data", metavar="PATH"
    )
    global_batch_size: int = flag(
        32, "rows of one update over all ranks", minimum=1, alias="--batch-size", metavar="ROWS"
    )
    num_microbatches: int = flag(1, "pieces in which a replica computes its rows", minimum=1, metavar="M")
    steps: int = flag(400, "updates in all", minimum=1, metavar="N")
    epochs: int | None = flag(None, "times that every row is trained on, instead of --steps", minimum=1, metavar="N")
    optimizer: str = flag("adamw", "how weights are updated", choices=OPTIMIZERS)
    lr: float = flag(3e-3, "learning rate", above=0, below=3.4e38, metavar="RATE")
    lr_schedule: str = flag("constant", "its course from the end of the warm-up to the last step", choices=LR_SCHEDULES)
    lr_warmup_steps: int = flag(0, "steps in which it rises from near zero to --lr", minimum=0, metavar="N")
    lr_min: float = flag(0.0, "where --lr-schedule linear or cosine ends", minimum=0, metavar="RATE")
    momentum: float = flag(0.9, "of --optimizer momentum", minimum=0, below=1, metavar="SHARE")
    weight_decay: float = flag(0.0, "as torch's optimizer of that name has it", minimum=0, metavar="RATE")
    clip_norm: float | None = flag(
        None, "gradients longer than this, as a norm over all parameters, are shortened to it", above=0, metavar="NORM"
    )
    precision: str = flag(
        "float32",
        "of weights and arithmetic (bf16-mixed: weights in float32, products in bfloat16)",
        choices=PRECISIONS,
    )
    eval_every: int | None = flag(None, "steps between evaluations on the held-out rows", minimum=1, metavar="N")
    eval_batches: int | None = flag(
        None,
        "evaluate, also at the end, on N global batches of rows, evenly spread; default: on all held-out rows",
        minimum=1,
        metavar="N",
    )
    early_stop: str | None = flag(
        None,
        "METRIC:N, as loss:3: end when METRIC got no lower in N evaluations; no higher for METRIC:N:max, accuracy:N",
        metavar="METRIC:N",
    )
    loader_workers: int = flag(0, "processes of each rank that read rows ahead", minimum=0, metavar="N")
    bucket_bytes: int = flag(1 << 20, "size of the pieces in which gradients travel", minimum=1, metavar="BYTES")
    threads: int | None = flag(
        None,
        "torch threads a rank; default: OMP_NUM_THREADS, else cores of the node / ranks on it",
        minimum=1,
        metavar="N",
    )
    seed: int = flag(0, "of weights, order of rows and dropout", minimum=0, metavar="N")
    run_dir: str | None = flag(None, "folder of this run, a new one; default: runs/TASK-TIME", metavar="PATH")
    tensorboard: bool = flag(False, "write curves for TensorBoard into the run's folder")
    on_nan: str = flag("stop", "what NaN or infinity in a loss or gradient does", choices=("stop", "skip"))

    def __post_init__(self):
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None:
                check_value(flag_name(each), value, each.type, each.metadata)
        if self.lr_min > self.lr:
            raise UsageError(f"--lr-min {self.lr_min}: should be at most --lr {self.lr}")
        if self.early_stop is not None:
            early_stop_rule(self.early_stop)
            if self.eval_every is None:
                raise UsageError(f"--early-stop {self.early_stop}: needs --eval-every N, the steps between evaluations")


def early_stop_rule(text: str) -> tuple[str, int, str]:
    """Metric, evaluations to wait, and `min` or `max`, of METRIC:N or METRIC:N:max.

    Without the third part a metric with `accuracy` in its name is to grow, any other to shrink.
    """
    metric, _, rest = text.partition(":")
    patience, _, better = rest.partition(":")
    if not better:
        better = "max" if "accuracy" in metric else "min"
    if not metric or not patience.isdecimal() or int(patience) < 1 or better not in ("min", "max"):
        raise UsageError(f"--early-stop {text}: expected METRIC:N or METRIC:N:max, such as loss:3")
    return metric, int(patience), better


def flag_name(each: dataclasses.Field) -> str:
    return "--" + each.name.replace("_", "-")


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
    if isinstance(value, (int, float)) and not (value >= low and above < value < below and math.isfinite(value)):
        raise UsageError(f"{name}: expected {describe(kinds[0], rules)}, got {value!r}")


def describe(kind: type, rules) -> str:
    """What a value may be, in words: `a whole number >= 1`."""
    words = KIND_WORDS[kind]
    bounds = [
        f"{sign} {rules[rule]}" for rule, sign in (("minimum", ">="), ("above", ">"), ("below", "<")) if rule in rules
    ]
    return " ".join([words, " and ".join(bounds)]).rstrip()


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
        action = "append" if each.type is dict else "store"
        top.add_argument(*names, dest=each.name, metavar=metavar, action=action, help=text.replace("%", "%%"))
    return top


def parse(argv: list[str]) -> tuple[Config, set[str]]:
    """The configuration that `argv` (and the file it names) asks for, and the names of the fields that `argv` gave."""
    texts = parser().parse(argv)
    path = texts.pop("config", None)
    settings = read_toml(path) if path is not None else {}
    if {"steps", "epochs"} <= texts.keys() or {"steps", "epochs"} <= settings.keys():
        raise UsageError("--epochs: give it or --steps, not both")
    if {"steps", "epochs"} & texts.keys():
        settings = {key: value for key, value in settings.items() if key not in ("steps", "epochs")}
    fields = {each.name: each for each in dataclasses.fields(Config)}
    for name, text in texts.items():
        if fields[name].type is dict:
            settings[name] = {**settings.get(name, {}), **_key_values(text)}
        else:
            settings[name] = _convert(fields[name], text)
    return Config(**settings), set(texts)


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
    if text == "none" and type(None) in get_args(each.type):
        return None  # takes back what the file says
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
