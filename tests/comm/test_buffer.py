"""What may travel and what is refused, by one clear line; memory is aligned and never copied; 16-bit floats round once.

Pure: no MPI. With `-W error` also without a warning.
"""

import warnings

import numpy as np
import pytest

from hpctrain.comm.buffer import ALIGNMENT, Buffer, HalfBuffer, allocate, as_buffer
from hpctrain.comm.ring import Ring

READ_ONLY = np.ones(4)
READ_ONLY.flags.writeable = False
REFUSED = {
    "transposed": (np.ones((3, 4)).T, "not contiguous"),
    "strided": (np.ones(10)[::2], "not contiguous"),
    "columns": (np.ones((4, 4))[:, 1:3], "not contiguous"),
    "reversed": (np.ones(4)[::-1], "not contiguous"),
    "Fortran order": (np.ones((3, 4), order="F"), "not contiguous"),
    "real part": (np.ones(4, np.complex64).real, "not contiguous"),
    "read-only": (READ_ONLY, "read-only"),
    "broadcast": (np.broadcast_to(1.0, 1), "read-only"),
    "objects": (np.array([1, "a"], object), "cannot travel"),
    "record with objects": (np.zeros(2, "i4,O"), "cannot travel"),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), "mask"),
    "list": ([1.0, 2.0], "got list"),
    "number": (3.0, "got float"),
    "none": (None, "got NoneType"),
    "scalar": (np.float64(3), "got float64"),
}


def torch_refused():
    torch = pytest.importorskip("torch")
    return {
        "transposed": (torch.ones(3, 4).t(), "not contiguous"),
        "strided": (torch.ones(10)[::2], "not contiguous"),
        "expanded": (torch.ones(1).expand(4), "not contiguous"),
        "channels last": (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), "not contiguous"),
        "sparse": (torch.ones(3).to_sparse(), "sparse"),
        "conjugate": (torch.ones(3, dtype=torch.complex64).conj(), "conjugate"),
        "meta": (torch.ones(3, device="meta"), "meta"),
        "float8": (torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    }


@pytest.mark.parametrize("array, reason", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_in_place_is_refused_by_one_line(array, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        as_buffer(array)
    assert "\n" not in str(caught.value)


def test_tensors_that_cannot_be_used_in_place_are_refused_by_one_line():
    for name, (tensor, reason) in torch_refused().items():
        with pytest.raises(ValueError, match=reason) as caught:
            as_buffer(tensor)
        assert "\n" not in str(caught.value), name


def test_refused_arrays_are_refused_before_anything_is_sent():
    base = np.arange(10.0)
    with pytest.raises(ValueError, match="not contiguous"):
        Ring().all_reduce(base[::2])
    assert base.tolist() == list(range(10))


@pytest.mark.parametrize("dtype", ["?", "S3", "U2", "V4", "M8[s]", "m8[s]"])
def test_what_has_no_sum_moves_but_is_not_summed(dtype):
    array = np.zeros(3, dtype)
    as_buffer(array)
    with pytest.raises(ValueError, match="a sum of .* has no meaning"):
        Ring().all_reduce(array)
    Ring().all_gather(array).wait()


@pytest.mark.parametrize("shape", [(), (0,), (1, 0, 2), (3, 4)])
def test_a_buffer_is_the_arrays_own_memory(shape):
    array = np.zeros(shape, np.int32)
    buffer = as_buffer(array)
    buffer.message(0, len(buffer))[:] = 1
    assert len(buffer) == array.size and np.all(array == 0x01010101)


@pytest.mark.parametrize("view", [np.matrix, np.recarray], ids=["matrix", "recarray"])
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_that_never_get_flat_are_seen_flat(view):
    array = np.arange(6.0).reshape(2, 3).view(view)
    buffer = as_buffer(array)
    assert type(buffer.values) is np.ndarray and buffer.values.shape == (6,)
    assert buffer.message(1, 3).view(np.float64).tolist() == [1, 2]


def test_unaligned_numbers_are_moved_and_summed():
    array = np.zeros(8 * 4 + 3, np.uint8)[3:].view(np.float64)
    array[:] = 1
    buffer = as_buffer(array)
    buffer.add(1, np.array([5.0, 6.0]))
    assert array.tolist() == [1, 6, 7, 1]


def test_a_message_is_the_bytes_of_its_elements():
    array = np.arange(5, dtype=">i2")
    assert as_buffer(array).message(1, 3).tolist() == [0, 1, 0, 2]
    assert as_buffer(array).dtype == ">i2" and as_buffer(array.astype("<i2")).dtype == "i2"


def test_allocated_memory_is_aligned():
    for nbytes in [1, 63, 64, 65, 1000, (4 << 20) + 1]:
        memory = allocate(nbytes)
        assert memory.size == nbytes and memory.ctypes.data % ALIGNMENT == 0 and memory.dtype == np.uint8


def test_integers_wrap_and_floats_overflow_without_a_word():
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        small = np.array([200], np.uint8)
        as_buffer(small).add(0, np.array([100], np.uint8))
        large = np.array([3e38], np.float32)
        as_buffer(large).add(0, np.array([3e38], np.float32))
        odd = np.array([np.inf])
        as_buffer(odd).add(0, np.array([-np.inf]))
    assert small[0] == 44 and np.isinf(large[0]) and np.isnan(odd[0])


@pytest.mark.parametrize("dtype", ["<f2", ">f2"])
def test_float16_is_summed_in_float32_and_rounded_once(dtype):
    array = np.array([2048, 60000, 1e-7, np.nan], dtype)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        buffer = as_buffer(array)
        partials = buffer.partials()
        for _ in range(2):
            partials.add(0, np.array([1, 30000, 1e-9, 1], np.float32))
        buffer.finish(0, 4, partials)
    assert isinstance(buffer, HalfBuffer) and buffer.partial == np.float32
    assert array[0] == 2050 and np.isinf(array[1]) and np.isnan(array[3])


def test_every_float16_survives_widening_and_rounding():
    array = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    before = array.copy()
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        buffer = as_buffer(array)
        buffer.finish(0, len(buffer), buffer.partials())
    assert np.array_equal(array, before, equal_nan=True)


def test_other_floats_are_summed_in_place():
    buffer = as_buffer(np.ones(3, np.float32))
    assert type(buffer) is Buffer and buffer.partials() is buffer


def test_tensors_are_used_in_place_also_parameters():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        parameter = torch.nn.Parameter(torch.zeros(2, 3).to(dtype), requires_grad=dtype.is_floating_point)
        buffer = as_buffer(parameter)
        buffer.message(0, 6)[:] = 1
        assert parameter.detach().view(torch.uint8).eq(1).all(), dtype
    assert as_buffer(torch.zeros(2, dtype=torch.bfloat16)).dtype == "bfloat16"


def test_one_rank_alone_keeps_its_bfloat16():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(5, dtype=torch.bfloat16)
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        getattr(Ring(), operation)(tensor).wait()
    assert tensor.tolist() == [0, 1, 2, 3, 4]
