"""Bugs of sums on devices that their checks must see: each leaves out one synchronisation, or one copy.

tests/comm/test_device_ring.py plants each and expects the check named here to turn red, on the paths named.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

from hpctrain.comm.collective import Collective
from hpctrain.comm.device_collective import DirectCollective, StagedCollective
from hpctrain.comm.stream import Device

BOTH, DIRECT, STAGED = ("direct", "staged"), ("direct",), ("staged",)


class Bug(NamedTuple):
    """`target.attribute` becomes `planted`; `check` is the name of a check in tests/comm/device_checks.py."""

    target: object
    attribute: str
    planted: Callable
    paths: tuple[str, ...]
    check: str = "random_program"


def _passed(self):
    return SimpleNamespace(done=True)


def _send_at_once(self):
    while self._leaving:
        self._send(self._leaving.popleft()[1])
    Collective._retire_sends(self)
    self._prepare()


def _to_nowhere(self, source, target):
    pass


def _all_but_the_last_byte(self, source, target):
    _to_device(self, source[:-1], target[:-1])


_to_device = Device.to_device


BUGS = {
    "what the caller computes is not waited for": Bug(Device, "produced", _passed, BOTH),
    "MPI gets memory before the device is there": Bug(
        DirectCollective, "_retire_sends", _send_at_once, BOTH, "many_segments"
    ),
    "MPI writes to memory that is still added": Bug(
        DirectCollective, "_may_overwrite", Collective._may_overwrite, BOTH, "many_segments"
    ),
    "a call is done before its last work is": Bug(
        DirectCollective, "_has_settled", lambda self: True, BOTH, "used_at_once"
    ),
    "no event of the own stream is waited for": Bug(Device, "mark", _passed, BOTH),
    "work goes to the stream that is current": Bug(Device, "work", nullcontext, BOTH),
    "work goes to the device that is current": Bug(Device, "_on_device", nullcontext, BOTH),
    "a sum on the host begins before the numbers are there": Bug(Device, "produced", _passed, STAGED, "summed_on_host"),
    "a sum on the host is done before its copy is": Bug(Device, "mark", _passed, STAGED, "summed_on_host"),
    "nothing is copied to the host": Bug(Device, "to_host", _to_nowhere, STAGED),
    "nothing is copied to the device": Bug(Device, "to_device", _to_nowhere, STAGED),
    "a byte is not copied to the device": Bug(Device, "to_device", _all_but_the_last_byte, STAGED),
    "memory of the host is used again while it is sent": Bug(
        StagedCollective, "_has_room", lambda self: True, STAGED, "many_segments"
    ),
    "MPI gets memory of the device": Bug(StagedCollective, "_outgoing", Collective._outgoing, STAGED),
}
