"""What of a device may travel, and how CuPy's arrays and CUDA tensors are seen: by CuPy's stand-in, without MPI."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hpctrain.comm import stream
from hpctrain.comm.buffer import Buffer, HalfBuffer, as_buffer
from hpctrain.comm.device_buffer import DeviceBFloat16Buffer, see
from hpctrain.comm.ring import Ring
from hpctrain.comm.stream import Device, Pool
from tests.comm.stand_in import DeviceArray, StandIn


class CupyArray(DeviceArray):
    """As CuPy's: it knows its device."""

    device = SimpleNamespace(id=1)


CupyArray.__module__ = "cupy"


@pytest.fixture
def library():
    return StandIn()


@pytest.fixture
def cupy(library, monkeypatch):
    """`import cupy` gives the stand-in."""
    module = ModuleType("cupy")
    module.__dict__.update(cuda=library.cuda, ndarray=library.ndarray, asarray=lambda t: library.array(t.numpy()))
    monkeypatch.setitem(sys.modules, "cupy", module)
    for known in (stream.cupy_device, stream.torch_device):
        known.cache_clear()
    yield library
    for known in (stream.cupy_device, stream.torch_device):
        known.cache_clear()


def test_an_array_of_cupy_is_seen_on_its_device_without_a_copy(cupy):
    array = CupyArray(cupy, np.arange(6.0, dtype=np.float32).reshape(2, 3))
    buffer = as_buffer(array)
    assert str(buffer.device) == "cuda:1" and len(buffer) == 6 and buffer.dtype == "f4"
    assert np.shares_memory(buffer.values.host, array.host) and as_buffer(buffer) is buffer
    assert as_buffer(array).device is buffer.device


def test_one_rank_alone_keeps_what_it_has(cupy):
    array = CupyArray(cupy, np.arange(3.0))
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        getattr(Ring(), operation)(array).wait()
    assert array.host.tolist() == [0, 1, 2]


class Cuda:
    """A CUDA tensor as far as it is looked at: a CPU one that tells another device."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.device = SimpleNamespace(type="cuda", index=2)

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def detach(self):
        return self

    def view(self, dtype):
        return Cuda(self.tensor.view(dtype))


def test_cuda_tensors_are_seen_as_cupys_arrays(cupy):
    torch = pytest.importorskip("torch")
    for dtype, name, kind in (
        (torch.float32, "f4", Buffer),
        (torch.float16, "f2", HalfBuffer),
        (torch.bfloat16, "bfloat16", DeviceBFloat16Buffer),
        (torch.int64, "i8", Buffer),
    ):
        buffer = as_buffer(Cuda(torch.ones(4).to(dtype)))
        assert (str(buffer.device), buffer.dtype, type(buffer), len(buffer)) == ("cuda:2", name, kind, 4)
    assert stream.torch_device(2) is not stream.cupy_device(2)


def test_a_call_on_a_tensor_waits_for_torchs_stream_not_for_cupys(cupy, monkeypatch):
    torch = pytest.importorskip("torch")
    device, of_torch, cupy.is_stuck = stream.torch_device(0), cupy.cuda.Stream(), True
    asked = []
    handle = SimpleNamespace(cuda_stream=cupy.streams.index(of_torch))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: asked.append(number) or handle)
    assert device.produced().done
    of_torch.tell(lambda: None, [])
    produced = device.produced()
    assert not produced.done and asked == [0, 0]
    of_torch.run_to(1)
    assert produced.done


def test_a_cuda_tensor_without_cupy_is_refused_by_one_line_that_says_what_to_install(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "cupy", None)
    tensor = Cuda(torch.ones(3))
    with pytest.raises(ValueError, match="needs CuPy, which adds on devices: install cupy-cuda12x") as caught:
        as_buffer(tensor)
    assert "\n" not in str(caught.value)


def test_neither_library_is_loaded_for_arrays_of_the_host():
    program = (
        "import sys, numpy, hpctrain.comm.allreduce as a; a.as_buffer(numpy.ones(3)); "
        "print(*({'torch', 'cupy'} & sys.modules.keys()))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_what_cannot_be_used_in_place_is_refused_by_one_line(library):
    device = Device(library)
    for values, words in (
        (np.ones(10)[::2], r"array of shape \(5,\) on cuda:0 is not contiguous"),
        (np.zeros(2, "M8[s]"), "arrays of datetime64.* cannot travel from cuda:0"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            see(DeviceArray(library, values), device)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="a sum of b1 has no meaning"):
        Ring().all_reduce(see(DeviceArray(library, np.ones(3, bool)), device))


def test_bfloat16_is_widened_and_rounded_as_torch_does(library):
    torch = pytest.importorskip("torch")
    device = Device(library)
    every = np.arange(1 << 16).astype(np.uint16)
    buffer = see(library.array(every), device, "bfloat16")
    partials = buffer.partials(lambda nbytes: library.array(np.zeros(nbytes, np.uint8)))
    rng = np.random.default_rng(0)
    added = (rng.standard_normal(every.size) * 10.0 ** rng.uniform(-38, 38, every.size)).astype(np.float32)
    partials.add(0, library.array(added))
    buffer.finish(0, every.size, partials, 3.0)
    library.finish()
    seen = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16)
    right = ((seen.float() + torch.from_numpy(added)) / 3.0).to(torch.bfloat16)
    got = torch.from_numpy(buffer.values.host.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), right.isnan())
    assert torch.equal(got.view(torch.int16)[~got.isnan()], right.view(torch.int16)[~got.isnan()])
    assert library.problems == []


def test_a_pool_lends_what_was_given_back_and_never_less_than_asked_for():
    allocated = []
    pool = Pool(lambda nbytes: allocated.append(nbytes) or np.empty(nbytes, np.uint8))
    for nbytes in (0, 1, 3, 1000, 1024):
        assert pool.lend(nbytes).size >= nbytes
    one = pool.lend(700)
    pool.take_back(one)
    assert pool.lend(800) is one and pool.lend(800) is not one
    assert allocated == [1, 1, 4, 1024, 1024, 1024, 1024]


def test_memory_for_messages_comes_from_no_pool_of_the_library(library):
    device, asked = Device(library), []
    memory = library.cuda.Memory
    library.cuda.Memory = lambda nbytes: asked.append(nbytes) or memory(nbytes)
    assert device.memory.lend(100).nbytes == 128 and asked == [128]
