"""Rounding to bfloat16, looked at number by number, and against torch."""

import numpy as np
import pytest

from hpctrain.comm.bfloat16 import BLOCK, BFloat16, TorchBFloat16, converter

EDGES = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]  # of the half that goes


@pytest.fixture(params=["numpy", "torch"])
def codec(request) -> BFloat16:
    return BFloat16() if request.param == "numpy" else TorchBFloat16(pytest.importorskip("torch"))


@pytest.fixture
def rounded(codec):
    def by_codec(values: np.ndarray) -> np.ndarray:
        bits = np.full(len(values), 0xABCD, np.uint16)
        codec.round(values, bits)
        return bits

    return by_codec


def value_of(bits: np.ndarray) -> np.ndarray:
    values = np.full(len(bits), np.nan, np.float32)
    BFloat16().widen(bits, values)
    return values


@pytest.fixture(scope="module")
def patterns() -> np.ndarray:
    """float32 with every upper half, and lower halves around the middle: all that rounding can meet."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    return np.concatenate([(upper << np.uint32(16)) | np.uint32(edge) for edge in EDGES]).view(np.float32)


def test_every_number_goes_to_the_nearest_and_from_the_middle_to_the_even_one(patterns, rounded):
    values = patterns[np.isfinite(patterns)]
    below = values.view(np.uint32) >> 16  # towards zero
    bits = rounded(values).astype(np.uint32)
    assert np.isin(bits - below, (0, 1)).all()
    step = 2.0 ** (np.maximum((below >> 7) & 0xFF, 1).astype(np.float64) - 127 - 7)
    lower = np.abs(value_of(below.astype(np.uint16)).astype(np.float64))
    beyond = np.abs(values.astype(np.float64)) - lower
    assert (bits[beyond < step / 2] == below[beyond < step / 2]).all()
    assert (bits[beyond > step / 2] == below[beyond > step / 2] + 1).all()
    middle = beyond == step / 2
    assert middle.sum() > 60_000 and (bits[middle] % 2 == 0).all()


def test_nan_stays_nan_and_infinity_infinity(patterns, rounded):
    assert np.isnan(value_of(rounded(patterns[np.isnan(patterns)]))).all()
    assert value_of(rounded(np.array([np.inf, -np.inf, -0.0], np.float32))).tolist() == [np.inf, -np.inf, 0.0]
    assert rounded(np.array([-0.0], np.float32)).tolist() == [0x8000]


def test_float64_beyond_float32_becomes_infinite_and_the_rest_as_a_float32(rounded):
    values = np.array([1e39, -1e300, 1e-60, np.nan, 1 / 3])
    assert np.array_equal(value_of(rounded(values))[:4], [np.inf, -np.inf, 0.0, np.nan], equal_nan=True)
    assert rounded(values)[4] == rounded(np.array([1 / 3], np.float32))[0]


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_length_equals_torch(length, dtype, codec):
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(length).standard_normal(length).astype(dtype)
    expected = torch.from_numpy(values.copy()).bfloat16()
    own, bits = values.copy(), np.empty(length, np.uint16)
    codec.keep(own, bits)
    assert bits.tobytes() == expected.view(torch.int16).numpy().tobytes()
    assert np.array_equal(own, expected.double().numpy())
    codec.add(bits, own)
    assert np.array_equal(own, 2 * expected.double().numpy())


def test_both_give_the_same_numbers(patterns):
    torch = pytest.importorskip("torch")
    assert type(converter()) is TorchBFloat16
    numbers = patterns[~np.isnan(patterns)]
    for values in (patterns, numbers.astype(np.float64) * (1 + 2.0**-30)):
        found = [np.empty(len(values), np.uint16) for _ in range(2)]
        BFloat16().round(values, found[0])
        TorchBFloat16(torch).round(values, found[1])
        assert ((found[0] == found[1]) | np.isnan(values)).all()
