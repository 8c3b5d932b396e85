"""Compressors with all ranks in one process: what they send, what they keep, and that all ranks hold the same bits."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.model.compressors import Gather, Part
from hpctrain.model.power_sgd import PowerSGD
from hpctrain.model.top_k import TopK, largest
from tests.oracles import feedback

SHAPES = {"weight": (12, 3, 5), "bias": (7,), "small": (2, 2), "scalar": (), "other": (9, 20)}
USED = 12 * 15 + 7 + 4 + 1 + 180
LENGTH = USED + 5  # the last ones belong to nobody, and are zero


def parts() -> dict[str, Part]:
    found, start = {}, 0
    for name, shape in SHAPES.items():
        shape = torch.Size(shape)
        found[name] = Part(slice(start, start + shape.numel()), shape)
        start += shape.numel()
    return found


class Ranks:
    """As many as `num_ranks`, with error feedback as training has it."""

    def __init__(self, compressor, num_ranks: int, length: int = LENGTH, dtype=torch.float64):
        zeros = torch.zeros(length, dtype=dtype)
        self.compressors = [compressor.bucket(3, zeros, parts(), rank, num_ranks) for rank in range(num_ranks)]
        self.kept = [zeros.clone() for _ in self.compressors]
        self.num_sent = 0

    def step(self, gradients: list[np.ndarray], applied: bool = True) -> np.ndarray:
        flats = [torch.from_numpy(own.copy()) + kept for own, kept in zip(gradients, self.kept)]
        left = [flat.clone() for flat in flats]
        running = [each.exchange(*pair) for each, pair in zip(self.compressors, zip(flats, left))]
        while wanted := [each for each in (next(own, None) for own in running) if each is not None]:
            arrays = [each.array for each in wanted]
            if isinstance(wanted[0], Gather):
                whole = torch.stack([array[rank] for rank, array in enumerate(arrays)])
            else:
                whole = torch.stack(arrays).sum(0)
            self.num_sent += arrays[0].numel()
            for array in arrays:
                array.copy_(whole)
        assert all(torch.equal(flat.nan_to_num(), flats[0].nan_to_num()) for flat in flats)
        for each in self.compressors:
            each.settle(applied)
        if applied:
            self.kept = left
        return flats[0].numpy()


def drawn(num_steps: int, num_ranks: int, length: int = LENGTH, seed: int = 0) -> list[list[np.ndarray]]:
    drawn = np.random.default_rng(seed).standard_normal((num_steps, num_ranks, length))
    drawn[:, :, USED:] = 0
    return [list(step) for step in drawn]


@pytest.mark.parametrize("fraction", ["0.01", "0.1", "0.5", "1"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("length", [1, 5, 300])
def test_top_k_sends_what_the_oracle_says_to_the_bit(num_ranks, fraction, length):
    ranks, gradients = Ranks(TopK(Fraction(fraction)), num_ranks, length), drawn(5, num_ranks, length)
    for own, (total, kept) in zip(gradients, feedback.top_k(gradients, Fraction(fraction))):
        assert np.array_equal(ranks.step(own), total)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(ranks.kept, kept))


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_power_sgd_sends_what_the_oracle_says(num_ranks, rank):
    ranks, gradients = Ranks(PowerSGD(rank), num_ranks), drawn(5, num_ranks)
    matrices = ranks.compressors[0]._matrices
    assert [each.place for each in matrices] == [parts()[name].place for name in ("weight", "other")]
    described = [(each.place, (each.rows, each.columns)) for each in matrices]
    starts = [each.start.numpy().copy() for each in matrices]
    for own, (total, kept) in zip(gradients, feedback.power_sgd(gradients, described, starts)):
        np.testing.assert_allclose(ranks.step(own), total, rtol=0, atol=1e-12)
        for ours, theirs in zip(ranks.kept, kept):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -0.0, float("inf"), float("nan")]), min_size=1), st.data())
def test_of_equal_magnitudes_the_first_are_chosen_and_nan_is_never_left(values, data):
    count = data.draw(st.integers(1, len(values)))
    size = [float("inf") if each != each else abs(each) for each in values]
    expected = sorted(sorted(range(len(values)), key=lambda place: (-size[place], place))[:count])
    assert largest(torch.tensor(values), count).tolist() == expected


def test_all_of_the_numbers_are_all_of_the_sum():
    for own in drawn(3, 4):
        ranks = Ranks(TopK(1), 4)
        np.testing.assert_allclose(ranks.step(own), np.sum(own, axis=0), rtol=0, atol=1e-14)
        assert not any(kept.any() for kept in ranks.kept)


def test_a_sum_of_low_rank_is_sent_whole():
    rng, ranks = np.random.default_rng(1), Ranks(PowerSGD(4), 4)
    own = []
    for _ in range(4):
        flat = np.zeros(LENGTH)
        for name, (rows, columns) in {"weight": (12, 15), "other": (9, 20)}.items():
            flat[parts()[name].place] = np.outer(rng.standard_normal(rows), rng.standard_normal(columns)).reshape(-1)
        own.append(flat)
    np.testing.assert_allclose(ranks.step(own), np.sum(own, axis=0), rtol=0, atol=1e-10)


COMPRESSORS = {"topk": TopK(0.05), "powersgd": PowerSGD(1)}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_not_sent_at_once_is_sent_in_time(name):
    """Of a constant gradient: the sum of T steps is T times it, but for what is still kept, which does not grow."""
    own = drawn(1, 3)[0]
    ranks, exact = Ranks(COMPRESSORS[name], 3), np.sum(own, axis=0)
    total, off = np.zeros(LENGTH), []
    for step in range(1, 201):
        total += ranks.step(own)
        np.testing.assert_allclose(total + sum(each.numpy() for each in ranks.kept), step * exact, atol=1e-9)
        off.append(np.linalg.norm(total / step - exact) / np.linalg.norm(exact))
    assert off[0] > 0.5 and off[49] < 0.35 and off[-1] < 0.1


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_skipped_step_leaves_no_trace(name, bad):
    """What is not finite on one rank is seen in the sum, whatever place it has."""
    gradients = drawn(4, 3)
    plain, ranks = (Ranks(COMPRESSORS[name], 3) for _ in range(2))
    for number, own in enumerate(gradients):
        if number in (0, 2):
            for place in (0, 183, 200):
                poisoned = [each.copy() for each in own]
                poisoned[1][place] = bad
                assert not np.isfinite(ranks.step(poisoned, applied=False)).all()
        assert np.array_equal(ranks.step(own), plain.step(own))


def test_much_less_is_sent():
    for name, most in {"topk": LENGTH * 0.05 * 12 * 3 + 3 * 12, "powersgd": 12 + 15 + 9 + 20 + 12}.items():
        ranks = Ranks(COMPRESSORS[name], 3)
        ranks.step(drawn(1, 3)[0])
        assert ranks.num_sent <= most  # bytes of three rows; numbers of two sums


@pytest.mark.parametrize("compressor", [TopK("0.1"), PowerSGD(2)])
def test_an_empty_bucket_goes(compressor):
    flat = torch.zeros(0)
    bucket = compressor.bucket(0, flat, {"none": Part(slice(0, 0), torch.Size([0, 3]))}, 0, 2)
    assert sum(each.array.numel() for each in bucket.exchange(flat, flat.clone())) <= 2 * 8
    bucket.settle(True)


@pytest.mark.parametrize("make", [lambda: TopK(0), lambda: TopK(1.5), lambda: PowerSGD(0)])
def test_what_sends_nothing_is_refused(make):
    with pytest.raises(ValueError, match="TopK: a fraction of|PowerSGD: rank"):
        make()
