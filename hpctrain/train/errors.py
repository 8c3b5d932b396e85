"""Errors that all ranks know of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpctrain.comm.group import Group
from hpctrain.train.signals import REQUEUE


class AgreedError(RuntimeError):
    """Raised on every rank alike, after they agreed: rank 0 prints one line, and the job ends in order with `code`."""

    code = 1


class NotFinite(AgreedError):
    """NaN or infinity in the loss or in a gradient of some rank."""


class Interrupted(AgreedError):
    """A signal asked this run to leave, and all that it is was saved."""

    code = REQUEUE


class NothingLeft(AgreedError):
    """The run is done already."""

    code = 0


@contextmanager
def agreed(group: Group) -> Iterator[None]:
    """An AgreedError, or a ValueError, that some ranks raise inside is raised on all of `group` at its end. Collective.

    What is collective inside may only concern ranks that would raise together.
    """
    fault = None
    try:
        yield
    except (AgreedError, ValueError) as error:
        fault = str(error)
    told = next(filter(None, group.all_gather_json(fault)), None)
    if told is not None:
        raise AgreedError(told)


def on_first(group: Group, call: Callable[[], Any]) -> Any:
    """What `call` gives on rank 0 of `group`, as JSON has it, on all ranks; AgreedError where it fails. Collective."""
    value, fault = outcome(call) if group.rank == 0 else (None, None)
    value, fault = group.broadcast_json([value, fault])
    if fault is not None:
        raise AgreedError(fault)
    return value


def on_all(group: Group, call: Callable[[], Any]) -> Any:
    """What `call` gives on this rank; AgreedError on all ranks of `group` where it fails on any. Collective."""
    value, fault = outcome(call)
    for rank, told in enumerate(group.all_gather_json(fault)):
        if told is not None:
            raise AgreedError(f"rank {rank}: {told}")
    return value


def outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """The value, or the line of what went wrong."""
    try:
        return call(), None
    except OSError as error:
        return None, f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
    except ValueError as error:
        return None, str(error)
