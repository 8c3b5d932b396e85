"""CuPy itself under all that stream.py and device_buffer.py ask of it; elsewhere a stand-in takes its place.

Whether an event has passed is asked while a kernel waits for the host to open a gate, so no clock decides.
"""

from contextlib import contextmanager

import numpy as np
import pytest

from hpctrain.comm.buffer import as_buffer
from hpctrain.comm.device_buffer import DeviceBFloat16Buffer, see
from hpctrain.comm.stream import Device, cupy_device, torch_device

cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")

GATE = r"""
extern "C" __global__ void gate(volatile int* is_open) {
    while (*is_open == 0) {}
}
"""
LENGTH = 1003
DTYPES = ("float64", "float32", "float16", "int32", "uint8", "complex64")


@pytest.fixture(scope="module")
def gate():
    """What lets a stream wait until it is opened; a kernel that is loaded late could wait for the gate itself."""
    kernel = cupy.RawKernel(GATE, "gate")
    is_open = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
    where = (np.uint64(is_open.ctypes.data),)  # pinned memory has one address for both

    @contextmanager
    def closed(stream):
        is_open[0] = 0
        try:
            with stream:
                kernel((1,), (1,), where)
            yield
        finally:
            is_open[0] = 1
        stream.synchronize()

    is_open[0] = 1
    with cupy.cuda.Stream(non_blocking=True) as stream:
        kernel((1,), (1,), where)
        stream.synchronize()
    return closed


@pytest.fixture
def device():
    return Device(cupy)


def numbers(dtype: str, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal(LENGTH) * 10
    return (values + 1j * random.standard_normal(LENGTH) if dtype == "complex64" else abs(values)).astype(dtype)


def test_one_device_for_each_number_and_library():
    assert cupy_device(0) is cupy_device(0) and torch_device(0) is not cupy_device(0)
    assert str(cupy_device(0)) == "cuda:0"


def test_work_is_done_on_a_stream_of_its_own(device):
    before = cupy.cuda.get_current_stream()
    with device.work():
        assert cupy.cuda.get_current_stream() != before
        assert cupy.cuda.get_current_stream() == device._stream
    assert cupy.cuda.get_current_stream() == before


def test_memory_is_the_devices_and_pinned_memory_the_hosts(device):
    attributes = cupy.cuda.runtime.pointerGetAttributes
    there, here = device.memory.lend(1000), device.pinned.lend(1000)
    assert there.size == here.size == 1024 and there.dtype == here.dtype == np.uint8
    assert attributes(there.data.ptr).type == cupy.cuda.runtime.memoryTypeDevice
    assert attributes(here.ctypes.data).type == cupy.cuda.runtime.memoryTypeHost
    device.memory.take_back(there)
    assert device.memory.lend(900) is there


def test_bytes_go_to_the_host_and_back(device):
    sent, there = device.pinned.lend(4096), device.memory.lend(4096)
    sent[:] = np.arange(4096) % 251
    device.to_device(sent, there)
    back = device.pinned.lend(4096)
    back[:] = 0
    device.to_host(there, back)
    event = device.mark()
    event.synchronize()
    assert event.done and np.array_equal(back, sent) and np.array_equal(there.get(), sent)
    device.to_host(there[:0], back[:0])  # nothing is no error
    device.to_device(sent[:0], there[:0])


def test_what_a_caller_computes_is_produced_when_his_stream_has_come_there(gate):
    stream = cupy.cuda.Stream(non_blocking=True)
    device = Device(cupy)
    with gate(stream):
        with stream:
            produced = device.produced()
        mark = device.mark()
        mark.synchronize()  # the stream of calls waits for nobody
        assert mark.done and not produced.done
    assert produced.done


def test_a_mark_passes_when_the_stream_of_calls_has_come_there(device, gate):
    with gate(device._stream):
        mark, produced = device.mark(), device.produced()
        produced.synchronize()
        assert produced.done and not mark.done
    assert mark.done


def test_the_stream_that_torch_computes_on_is_asked(gate):
    device = torch_device(0)
    of_torch = torch.cuda.Stream(0)
    with gate(cupy.cuda.ExternalStream(of_torch.cuda_stream)):
        with torch.cuda.stream(of_torch):
            produced = device.produced()
        elsewhere = device.produced()
        elsewhere.synchronize()
        assert elsewhere.done and not produced.done
    assert produced.done


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_on_the_device_are_those_of_the_host(dtype):
    own, received, divisor = numbers(dtype), numbers(dtype, 1), 3.0 if dtype.startswith("float") else 1.0
    here, there = as_buffer(own.copy()), as_buffer(cupy.asarray(own))
    assert str(there.device) == "cuda:0" and here.device is None
    assert (len(there), there.dtype, there.itemsize, there.partial) == (
        len(here),
        here.dtype,
        here.itemsize,
        here.partial,
    )
    there.check_summable()
    arrived = received.astype(here.partial)
    sums, sums_there = here.partials(), there.partials(lambda nbytes: cupy.empty(nbytes, np.uint8))
    sums.add(3, arrived[3:900])
    sums_there.add(3, cupy.asarray(arrived[3:900]))
    here.finish(3, 900, sums, divisor)
    there.finish(3, 900, sums_there, divisor)
    assert there.values.get().tobytes() == here.values.tobytes()
    assert there.message(1, 5).get().tobytes() == here.message(1, 5).tobytes()
    assert there.overlaps(as_buffer(there.values[10:20])) and not there.overlaps(here)


def test_bfloat16_is_widened_and_rounded_as_torch_does():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    scale = 10.0 ** np.random.default_rng(0).uniform(-38, 38, len(every))
    added = torch.from_numpy((np.random.default_rng(1).standard_normal(len(every)) * scale).astype(np.float32)).cuda()
    buffer = as_buffer(every.clone())
    assert isinstance(buffer, DeviceBFloat16Buffer)
    buffer.check_summable()
    partials = buffer.partials(lambda nbytes: cupy.empty(nbytes, np.uint8))
    partials.add(0, cupy.asarray(added))
    buffer.finish(0, len(every), partials, 3.0)
    right = ((every.cpu().float() + added.cpu()) / 3.0).to(torch.bfloat16)
    got = torch.from_numpy(buffer.values.get().view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), right.isnan())
    assert torch.equal(got.view(torch.int16)[~got.isnan()], right.view(torch.int16)[~got.isnan()])


def test_a_tensor_is_seen_without_a_copy():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
        tensor = torch.zeros(3, 5, dtype=dtype, device="cuda")
        buffer = as_buffer(tensor)
        assert buffer.values.data.ptr == tensor.data_ptr() and len(buffer) == 15
        assert buffer.device is torch_device(0)
    assert len(as_buffer(torch.zeros(0, device="cuda"))) == 0


def test_what_cannot_travel_is_refused_by_one_line(device):
    for make, words in (
        (lambda: as_buffer(cupy.zeros(10)[::2]), "is not contiguous; pass a contiguous copy"),
        (lambda: as_buffer(torch.zeros(4, 4, device="cuda").T), "is not contiguous"),
        (lambda: see(cupy.zeros(3, bool), device).check_summable(), "has no meaning"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            make()
        assert "\n" not in str(caught.value)
