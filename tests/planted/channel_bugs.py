"""Bugs of channels on devices that their check must see: each leaves out one synchronisation, or one copy.

tests/comm/test_device_channel.py plants each and expects device_channel_checks.conversation to turn red.
"""

from hpctrain.comm import channel
from hpctrain.comm.parcels import DeviceParcel, Memory, StagedArrival
from hpctrain.comm.stream import Device, Pool
from tests.planted.device_bugs import BOTH, STAGED, Bug, _passed, _to_nowhere


def _lent_again(self, nbytes):
    memory = _lend(self, nbytes)
    self.take_back(memory)
    return memory


def _used_again_at_once(self, tensor):
    key = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type != "cpu")
    self._pool.setdefault(key, []).append(tensor)


def _here_as_it_is_copied(self):
    _arrived(self)
    return self._copied is not None


def _without_the_copy(self):
    pass


_lend, _arrived = Pool.lend, StagedArrival.poll

BUGS = {
    "what the caller computes is not waited for": Bug(Device, "produced", _passed, BOTH),
    "MPI gets memory before the device is there": Bug(Device, "mark", _passed, BOTH),
    "memory is used again while it is sent": Bug(Pool, "lend", _lent_again, BOTH),
    "memory is used again while it is read": Bug(Memory, "release", _used_again_at_once, BOTH),
    "a tensor is handed out before it is copied": Bug(StagedArrival, "poll", _here_as_it_is_copied, STAGED),
    "nothing is copied before it leaves": Bug(DeviceParcel, "_copy", _without_the_copy, BOTH),
    "nothing is copied to the device": Bug(Device, "to_device", _to_nowhere, STAGED),
    "MPI gets memory of the device": Bug(channel, "takes_device_memory", lambda comm, progress: True, STAGED),
}
