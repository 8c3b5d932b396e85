"""What the CUDA driver is asked, by a driver that is made up; and that a machine without one is no error."""

import json
import subprocess
import sys

import pytest

from hpctrain.comm.devices import DRIVER, visible_devices
from hpctrain.plan.devices import choose_all

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
UUIDS = [bytes([number] * 16) for number in range(4)]
NAMES = [f"GPU-{number:02x}{number:02x}" for number in range(4)]
FORMS = {  # CUDA_VISIBLE_DEVICES, what a driver of four devices shows by it, and what four ranks of a node take of that
    "unset": (None, [0, 1, 2, 3], [0, 1, 2, 3]),
    "two numbers": ("2,3", [2, 3], [0, 1, 0, 1]),
    "another order": ("3,1", [3, 1], [0, 1, 0, 1]),
    "one": ("2", [2], [0, 0, 0, 0]),
    "nothing": ("", [], [None] * 4),
    "minus one": ("-1", [], [None] * 4),
    "up to minus one": ("0,2,-1,1", [0, 2], [0, 1, 0, 1]),
    "a UUID": ("GPU-03030303-0303-0303-0303-030303030303", [3], [0, 0, 0, 0]),
    "the beginning of a UUID": ("GPU-0101", [1], [0, 0, 0, 0]),
}


class Driver:
    """Shows `seen` of the four devices, in that order."""

    def __init__(self, seen, error=0):
        self.seen, self.error = seen, error

    def cuInit(self, flags):
        return self.error or (0 if self.seen else NO_DEVICE)

    def cuDeviceGetCount(self, number):
        number._obj.value = len(self.seen)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = 10 + index  # a handle is no index
        return 0

    def cuDeviceGetUuid(self, data, device):
        data._obj[:] = UUIDS[self.seen[device.value - 10]]
        return 0

    def cuGetErrorName(self, code, text):
        text._obj.value = {NO_DEVICE: b"CUDA_ERROR_NO_DEVICE", 803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}[code]
        return 0


@pytest.mark.parametrize("form, seen, taken", FORMS.values(), ids=FORMS)
def test_a_process_takes_numbers_of_what_it_sees(form, seen, taken):
    """Whatever the form, numbers count what is visible: with "2,3" they are 0 and 1."""
    names, why = visible_devices(lambda path: Driver(seen))
    assert [name[:8] for name in names] == [NAMES[index] for index in seen]
    assert (why is None) == bool(seen)
    assert choose_all([1] * 4, [names] * 4) == taken


def test_one_id_for_each_process_is_number_0_of_every_one():
    visible = [visible_devices(lambda path, index=index: Driver([index]))[0] for index in range(4)]
    assert len({names[0] for names in visible}) == 4
    assert choose_all([1] * 4, visible) == [0, 0, 0, 0]


def test_a_mig_instance_has_a_name_of_its_own():
    class Newer(Driver):
        def cuDeviceGetUuid_v2(self, data, device):
            data._obj[:] = bytes([0xAB] * 16)
            return 0

    assert visible_devices(lambda path: Newer([0]))[0] == ["GPU-abababab-abab-abab-abab-abababababab"]


@pytest.mark.parametrize(
    "driver, why",
    [
        (Driver([]), "cuInit of the CUDA driver: CUDA_ERROR_NO_DEVICE (100)"),
        (Driver([0], error=803), "cuInit of the CUDA driver: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
    ],
)
def test_why_there_is_none(driver, why):
    assert visible_devices(lambda path: driver) == ([], why)


def test_no_driver_is_no_error():
    def missing(path):
        raise OSError(f"{path}: cannot open shared object file")

    assert visible_devices(missing) == ([], f"no CUDA driver ({DRIVER})")


def test_the_driver_of_this_machine_is_asked_without_torch():
    program = """import json, sys
from hpctrain.comm.devices import visible_devices
print(json.dumps([*visible_devices(), "torch" in sys.modules]))"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    names, why, torch_loaded = json.loads(shown.stdout)
    assert bool(names) != bool(why) and not torch_loaded


def test_a_driver_that_lacks_a_call_shows_none_and_says_which():
    devices, why = visible_devices(load=lambda name: object())
    assert devices == [] and "cuInit" in why
