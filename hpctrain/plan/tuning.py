"""What `tune` has measured, as its file has it: constants, a size of buckets, and where that was.

A file comes from somewhere, so all of it is looked at before any of it is used. Values may change which algorithm runs
and where gradients are cut, never what is right: the limits keep out what no machine is like.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpctrain.plan.allreduce import BUILT_IN, LARGEST_MESSAGE, Constants

FORMAT = 1
CURE = "measure again: mpirun -n N python -m hpctrain tune --out FILE"


class Rule(NamedTuple):
    """What a number may be, both ends included."""

    kind: type
    low: float
    high: float
    unit: str

    def fault(self, value: Any) -> str | None:
        """What is wrong with it, if anything."""
        kinds = (int, float) if self.kind is float else (int,)
        if isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high:
            return None
        whole = "a whole number of " if self.kind is int else ""
        return f"is {shown(value)}; expected {whole}{self.unit} from {self.low:g} to {self.high:g}"


CONSTANTS = {
    "latency": Rule(float, 1e-9, 60, "seconds"),
    "seconds_per_byte": Rule(float, 1e-15, 1e-3, "seconds"),
    "largest_doubled": Rule(int, 0, LARGEST_MESSAGE, "bytes"),
    "largest_staged": Rule(int, 0, 1 << 50, "bytes"),
}
BUCKET_BYTES = Rule(int, 1, 1 << 50, "bytes")
COUNT = Rule(int, 1, 1 << 30, "ranks or nodes")
TOLD = {"hpctrain": str, "date": str, "task": str, "times": list, "steps": list}  # for people
OPTIONAL = {"bucket_bytes", "task", "steps"}


@dataclass(frozen=True)
class Place:
    """The ranks that sum up together, and what carries their messages; `ranks_per_node` None: unequally many."""

    ranks: int
    nodes: int
    ranks_per_node: int | None
    mpi: str

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        if self.nodes == 1:
            return f"{ranks} on 1 node with {self.mpi}"
        each = "unequally many" if self.ranks_per_node is None else self.ranks_per_node
        return f"{ranks} on {self.nodes} nodes, {each} on each, with {self.mpi}"


@dataclass(frozen=True)
class Tuning:
    """What a mesh and a training run take of a measurement; without one what is built in."""

    constants: Constants = BUILT_IN
    bucket_bytes: int | None = None
    place: Place | None = None

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Tuning":
        """Of what `dataclasses.asdict` has made of one."""
        place = values["place"]
        return Tuning(Constants(**values["constants"]), values["bucket_bytes"], Place(**place) if place else None)


def parse(text: str) -> Tuning:
    """Of the text of a file. ValueError, one line that names the key and what would work."""
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except _Twice as error:
        raise ValueError(f"{error}; {CURE}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"not a whole file of JSON; {CURE}") from None
    try:
        return _checked(values)
    except ValueError as error:
        raise ValueError(f"{error}; {CURE}") from None


def constants_of(values: Mapping[str, Any]) -> Constants:
    """Of exactly these keys. ValueError, one line that names the key, for one that lacks, is too much, or cannot be."""
    _check_keys(values, CONSTANTS, ())
    for key, rule in CONSTANTS.items():
        if fault := rule.fault(values[key]):
            raise ValueError(f"{key} {fault}")
    return Constants(**{key: rule.kind(values[key]) for key, rule in CONSTANTS.items()})


def within(key: str, value: float) -> float:
    """The value, or the end of what the constant of this name may be that is nearest to it."""
    rule = CONSTANTS[key]
    return rule.kind(min(max(value, rule.low), rule.high))


def shown(value: Any) -> str:
    """In a few characters of one line."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _checked(values: Any) -> Tuning:
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError("format: missing, so `tune` did not write this")
    if not isinstance(values["format"], int) or isinstance(values["format"], bool) or values["format"] < 1:
        raise ValueError(f"format is {shown(values['format'])}; expected {FORMAT}")
    if values["format"] > FORMAT:
        raise ValueError(f"format {shown(values['format'])} is newer than this hpctrain, which reads {FORMAT}")
    place_keys = [each.name for each in dataclasses.fields(Place)]
    _check_keys(values, ["format", *place_keys, *CONSTANTS, "bucket_bytes", *TOLD], OPTIONAL)
    constants = constants_of({key: values[key] for key in CONSTANTS})
    place = _place(values)
    if "bucket_bytes" in values and (fault := BUCKET_BYTES.fault(values["bucket_bytes"])):
        raise ValueError(f"bucket_bytes {fault}")
    for key, kind in TOLD.items():
        if key in values and not isinstance(values[key], kind):
            raise ValueError(f"{key} is {shown(values[key])}; expected {'text' if kind is str else 'a list'}")
    return Tuning(constants, values.get("bucket_bytes"), place)


def _place(values: Mapping[str, Any]) -> Place:
    for key in ("ranks", "nodes", "ranks_per_node"):
        if values[key] is None and key == "ranks_per_node":
            continue
        if fault := COUNT.fault(values[key]):
            raise ValueError(f"{key} {fault}")
    if not isinstance(values["mpi"], str) or not values["mpi"].isprintable() or len(values["mpi"]) > 200:
        raise ValueError(f"mpi is {shown(values['mpi'])}; expected the name of a library")
    ranks, nodes, each = values["ranks"], values["nodes"], values["ranks_per_node"]
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}; expected 2 at least")
    if nodes > ranks:
        raise ValueError(f"nodes is {nodes}; expected at most the {ranks} ranks")
    if each is not None and nodes * each != ranks:
        raise ValueError(f"ranks_per_node is {each}; {ranks} ranks on {nodes} nodes do not fit that")
    return Place(ranks, nodes, each, values["mpi"])


def _check_keys(values: Mapping[str, Any], known: Iterable[str], optional: Iterable[str]) -> None:
    known = list(known)
    for key in known:
        if key not in values and key not in optional:
            raise ValueError(f"{key}: missing")
    for key in values:
        if key not in known:
            raise ValueError(f"{shown(key)}: no such key; there is {', '.join(known)}")


class _Twice(ValueError):
    """A key stands there twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(f"{shown(key)}: stands there twice")
        found[key] = value
    return found
