"""What the CUDA driver lets this process use, asked of the driver itself, without torch; and who here knows of CUDA.

CUDA_VISIBLE_DEVICES holds numbers, beginnings of UUIDs or MIG instances, and ends at the first that is none: only the
driver reads all of its forms as the driver does. NVML and /proc/driver/nvidia tell what the machine has, not what this
process sees. cuInit makes no context and takes no device memory; but who is forked after it cannot use CUDA, as after
torch.cuda.init.
"""

import ast
import ctypes
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"


def visible_devices(load=ctypes.CDLL) -> tuple[list[str], str | None]:
    """The UUIDs of the devices that this process sees, in its order, and why there are none. Never raises.

    `load` gives the driver's library, or raises OSError.
    """
    try:
        driver = load(DRIVER)
    except OSError:
        return [], f"no CUDA driver ({DRIVER})"
    try:
        _call(driver, "cuInit", 0)
        number = ctypes.c_int()
        _call(driver, "cuDeviceGetCount", ctypes.byref(number))
        names = [_name(driver, index) for index in range(number.value)]
    except (OSError, AttributeError) as error:  # the latter of a library that lacks a call
        return [], str(error)
    return names, None if names else "the CUDA driver shows none"


def torch_cuda() -> str | None:
    """The CUDA that torch was built with, as its file version.py says; None: none, or no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return ast.literal_eval(node.value)
    return None


def has_cupy() -> bool:
    return find_spec("cupy") is not None


def _name(driver: Any, index: int) -> str:
    """Of a MIG instance its own, which version 2 of the call gives; not every driver has that."""
    device, data = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call(driver, "cuDeviceGet", ctypes.byref(device), index)
    call = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    _call(driver, call, ctypes.byref(data), device)
    return f"GPU-{uuid.UUID(bytes=bytes(data))}"


def _call(driver: Any, name: str, *arguments) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise OSError(f"{name} of the CUDA driver: {(text.value or b'error').decode()} ({code})")
