"""What several workers pushed becomes one gradient, by hand and without a division by zero."""

import pytest
import torch

from hpctrain.model.aggregate import AGGREGATES, Aggregate

SUMS = torch.tensor([[2.0, 10.0, -4.0], [3.0, 3.0, 3.0], [50.0, -10.0, 0.0], [4.0, 0.0, 8.0]], dtype=torch.float64)
COUNTS = [2.0, 1.0, 0.5, 4.0]  # the means: (1, 5, -2), (3, 3, 3), (100, -20, 0), (1, 0, 2)


def dense(name, sums=SUMS, counts=COUNTS):
    return Aggregate(name).dense(sums, counts).tolist()


def test_by_hand():
    assert dense("sum") == [59.0, 3.0, 7.0]
    assert dense("mean") == pytest.approx([59 / 7.5, 3 / 7.5, 7 / 7.5])
    assert dense("median") == [2.0, 1.5, 1.0]
    assert dense("trimmed-mean") == [2.0, 1.5, 1.0]
    assert dense("median", SUMS[:3], COUNTS[:3]) == [3.0, 3.0, 0.0]
    assert dense("median", SUMS[:2], COUNTS[:2]) == dense("trimmed-mean", SUMS[:2], COUNTS[:2]) == [2.0, 4.0, 0.5]


def test_trimmed_mean_drops_a_tenth_at_each_end():
    for workers, dropped in ((1, 0), (2, 0), (3, 1), (19, 1), (20, 2), (30, 3)):
        values = torch.arange(workers).double() ** 2
        shuffled = values[torch.randperm(workers, generator=torch.Generator().manual_seed(0))][:, None]
        expected = values[dropped : workers - dropped].mean().item()
        assert dense("trimmed-mean", shuffled, [1.0] * workers) == pytest.approx([expected])


@pytest.mark.parametrize("name", AGGREGATES)
def test_workers_without_items_are_left_out_and_none_at_all_is_no_update(name):
    wild = torch.cat([SUMS, torch.full((2, 3), torch.nan, dtype=torch.float64)])
    assert dense(name, wild, [*COUNTS, 0.0, 0.0]) == dense(name)
    aggregate = Aggregate(name)
    assert aggregate.dense(SUMS, [0.0] * 4) is None
    assert aggregate.rows([(torch.tensor([1]), SUMS[:1], 0.0)]) is None
    assert aggregate.rows([]) is None


def test_the_mean_is_the_sum_in_worker_order_times_one_over_items():
    sums = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    expected = sums[0].clone()
    for each in sums[1:]:
        expected = expected + each
    assert torch.equal(Aggregate("mean").dense(sums, [3.0] * 5), expected * (1.0 / 15))
    for name in ("mean", "median", "trimmed-mean"):  # of one worker, all are the mean, bit for bit
        assert torch.equal(Aggregate(name).dense(sums[:1], [3.0]), sums[0] * (1.0 / 3.0))


def pushes():
    def rows(*numbers):
        return torch.tensor(numbers, dtype=torch.float64)[:, None].expand(-1, 2)

    return [
        (torch.tensor([7, 3, 3]), rows(4.0, 1.0, 1.0), 2.0),
        (torch.tensor([3, 9]), rows(9.0, 6.0), 3.0),
        (torch.tensor([9, 3, 1]), rows(1.0, 5.0, 8.0), 1.0),
        (torch.tensor([3]), rows(100.0), 0.0),
    ]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("sum", {1: 8.0, 3: 16.0, 7: 4.0, 9: 7.0}),
        ("mean", {1: 8 / 6, 3: 16 / 6, 7: 4 / 6, 9: 7 / 6}),
        ("median", {1: 8.0, 3: 3.0, 7: 2.0, 9: 1.5}),
        ("trimmed-mean", {1: 8.0, 3: 3.0, 7: 2.0, 9: 1.5}),
    ],
)
def test_rows_over_the_workers_that_pushed_them(name, expected):
    ids, gradients = Aggregate(name).rows(pushes())
    assert ids.tolist() == list(expected)
    assert gradients[:, 0].tolist() == pytest.approx(list(expected.values())) and gradients.shape == (4, 2)
    assert torch.equal(gradients[:, 0], gradients[:, 1])


OWN = """
import torch
def middle(sums, counts):
    assert sums.ndim == 2 and sums.shape[1] in (2, 3)
    return (sums / counts.to(sums.dtype)[:, None]).median(0).values
def short(sums, counts): return sums[0][:1]
def number(sums, counts): return 1.0
def infinite(sums, counts): return sums[0] / 0
def broken(sums, counts):
    raise KeyError("no\\nsuch")
constant = 3
"""


def test_a_function_of_the_users_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    aggregate = Aggregate(f"{file}:middle")
    assert aggregate.dense(SUMS[:3], COUNTS[:3]).tolist() == [3.0, 3.0, 0.0]
    ids, gradients = aggregate.rows(pushes())  # row by row: the function sees rows of width 2
    assert ids.tolist() == [1, 3, 7, 9] and gradients[:, 0].tolist() == [8.0, 3.0, 2.0, 1.0]
    for function, message in {
        "short": "it returned torch.float64 (1,), not a tensor torch.float64 (3,)",
        "number": "it returned float, not a tensor torch.float64 (3,)",
        "infinite": "it returned NaN or infinity",
        "broken": "KeyError: 'no\\nsuch' (own.py, line 10)",
    }.items():
        with pytest.raises(ValueError) as caught:
            Aggregate(f"{file}:{function}").dense(SUMS[:3], COUNTS[:3])
        assert str(caught.value) == f"--aggregate {file}:{function}: {message}"


@pytest.mark.parametrize(
    "name, message",
    [
        ("middle", "there is no such aggregate; choose mean, sum, median, trimmed-mean or FILE.py:function"),
        ("FOLDER/none.py:f", "no such file"),
        ("FOLDER/own.py:absent", "has no function absent"),
        ("FOLDER/own.py:constant", "has no function constant"),
        ("FOLDER/wrong.py:f", "SyntaxError"),
        ("FOLDER/own.py:", "there is no such aggregate"),
    ],
)
def test_what_is_no_aggregate_is_refused_in_one_line(name, message, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "wrong.py").write_text("def f(:\n")
    name = name.replace("FOLDER", str(tmp_path))
    with pytest.raises(ValueError) as caught:
        Aggregate(name)
    told = str(caught.value)
    assert told.startswith(f"--aggregate {name}: ") and message in told and "\n" not in told
