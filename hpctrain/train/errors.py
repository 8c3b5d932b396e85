"""Errors that all ranks know of."""

from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.comm.group import Group


class AgreedError(RuntimeError):
    """Raised on every rank alike, after they agreed: rank 0 prints one line, and the job ends in order."""


class NotFinite(AgreedError):
    """NaN or infinity in the loss or in a gradient of some rank."""


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
