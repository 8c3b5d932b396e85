"""Rows are the same whoever makes them, a push changes what it names and nothing else, and an error changes nothing."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.model.dense_table import DenseTable
from hpctrain.model.row_optimizers import ROW_OPTIMIZERS, Sgd, build_row_optimizer
from hpctrain.model.row_values import TableError, _log, first_values, sum_duplicates
from hpctrain.model.tables import EmbeddingTable
from tests.harness.launch import ROOT

FIRST = [
    "-0x1.b2b88760b661bp-2",
    "-0x1.28d3d6caaf521p-2",
    "-0x1.33add60cb914dp+0",
    "0x1.4a4dafe9a84cbp-1",
    "0x1.88f6aad68e03bp+0",
    "0x1.063cd6bbcc772p+0",
    "-0x1.6614436a553dap-2",
    "-0x1.036050ad321d3p+0",
    "-0x1.963c43ecf7d1ep-1",
]
SHAPES = {"a.weight": (3, 5), "a.bias": (3,), "b.weight[4:9]": (5,)}  # of a dense table
MEMORY = """
import resource, sys
import numpy as np, torch
from hpctrain.model.row_optimizers import build_row_optimizer
from hpctrain.model.tables import EmbeddingTable

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def use(table, ids):
    for part in np.split(ids, 50):
        table.push(part, torch.ones(len(part), 16), lr=0.1)

use(EmbeddingTable("before", 1000, 16, 0, 0.1, build_row_optimizer("adagrad")), np.arange(1000))
ids = np.random.default_rng(0).permutation(10_000_000)[:200_000].copy()
before = resident()
table = EmbeddingTable("large", 10_000_000, 16, 0, 0.1, build_row_optimizer("adagrad"))
use(table, ids)
print(resident() - before, table.num_touched, table.nbytes_touched)
"""


def table(optimizer="adam", rows=10, width=3, name="items", dtype=torch.float64, **more):
    optimizer = build_row_optimizer(optimizer, weight_decay=0.01) if isinstance(optimizer, str) else optimizer
    return EmbeddingTable(name, rows, width, 7, 0.5, optimizer, dtype, **more)


def ones(count, width=3, dtype=torch.float64):
    return torch.ones(count, width, dtype=dtype)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_first_values_are_normal_and_neighbours_know_nothing_of_each_other():
    values = first_values(123, np.arange(40000), 16, 0.5) / 0.5
    far = 4 / math.sqrt(values.size)
    assert abs(values.mean()) < far and abs(values.std() - 1) < far
    assert abs((values**3).mean()) < 5 * far and abs((values**4).mean() - 3) < 15 * far
    ordered = np.sort(values.ravel())
    normal = 0.5 * (1 + torch.erf(torch.from_numpy(ordered) / math.sqrt(2)).numpy())
    assert np.abs(normal - (np.arange(values.size) + 0.5) / values.size).max() < 2 / math.sqrt(values.size)
    other = first_values(124, np.arange(40000), 16, 1.0)
    pairs = [(values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values[:, ::2], values[:, 1::2])]
    for a, b in [*pairs, (values, other), (values[2::2], values[:-2:2]), (values[1024:], values[:-1024])]:
        assert abs((a * b).mean()) < 5 / math.sqrt(a.size)
        assert abs((a**2 * b**2).mean() - 1) < 15 / math.sqrt(a.size)
    assert len(np.unique(values)) == values.size


def test_first_values_are_these_bits_on_every_machine():
    values = first_values(123, np.array([0, 5, 2**40 - 1]), 3, 1.0)
    assert [float(x).hex() for x in values.ravel()] == FIRST


def test_logarithm_and_deviation_are_right_to_rounding():
    x = np.concatenate([[2.0**-53, 0.5, math.sqrt(0.5), 1.0], np.random.default_rng(0).random(1000)])
    np.testing.assert_allclose(_log(x), np.log(x), rtol=1e-15, atol=3e-16)
    assert np.abs(first_values(1, np.arange(5), 4, 0.0)).max() == 0


def test_a_column_does_not_depend_on_the_width_nor_a_row_on_its_company():
    wide = first_values(9, np.arange(30), 7, 1.0)
    assert np.array_equal(wide[:, :4], first_values(9, np.arange(30), 4, 1.0))
    assert np.array_equal(wide[11:12], first_values(9, np.array([11]), 7, 1.0))
    big = first_values(9, np.arange(3000), 7, 1.0)
    assert np.array_equal(big[:30], wide)


@given(st.integers(1, 5), st.permutations(range(23)), st.integers(1, 23))
def test_rows_are_the_same_for_any_number_of_shards_and_any_order(num_shards, order, at_once):
    whole = table(rows=23).rows(np.arange(23))
    shards = [table(rows=23, ids=(shard, num_shards)) for shard in range(num_shards)]
    for start in range(0, 23, at_once):
        for shard in range(num_shards):
            own = [number for number in order[start : start + at_once] if number % num_shards == shard]
            assert torch.equal(shards[shard].rows(np.array(own, dtype=np.int64)), whole[own])
    for shard, each in enumerate(shards):
        ids, values = each.fingerprint_rows()
        assert ids.tolist() == list(range(shard, 23, num_shards)) and torch.equal(values, whole[ids])
        assert each.num_touched == len(ids) and torch.equal(each.touched(), ids)


def test_other_seeds_and_names_have_other_rows_and_float32_rounds_float64():
    rows = table().rows([1, 2])
    assert not torch.equal(rows, table(name="users").rows([1, 2]))
    assert not torch.equal(rows, EmbeddingTable("items", 10, 3, 8, 0.5, Sgd(), torch.float64).rows([1, 2]))
    assert torch.equal(rows.float(), table(dtype=torch.float32).rows(torch.tensor([1, 2], dtype=torch.int32)))


def test_rows_are_a_copy_with_duplicates_and_none_for_no_ids():
    items = table()
    rows = items.rows([3, 3, 5])
    assert torch.equal(rows[0], rows[1]) and items.touched().tolist() == [3, 5]
    rows.zero_()
    assert items.rows([3]).abs().min() > 0
    assert items.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 3)
    items.push(np.empty(0, np.int64), ones(0), lr=1.0)
    assert items.touched().tolist() == [3, 5]


@given(st.lists(st.integers(0, 8), max_size=40), st.sampled_from([torch.float32, torch.float64]))
def test_duplicates_are_summed_as_a_dense_scatter_add_does(ids, dtype):
    gradients = torch.randn(len(ids), 4, dtype=dtype, generator=torch.Generator().manual_seed(len(ids)))
    unique, sums = sum_duplicates(np.array(ids, dtype=np.int64), gradients)
    dense = torch.zeros(9, 4, dtype=dtype).index_add_(0, torch.tensor(ids, dtype=torch.int64), gradients)
    assert sorted(unique.tolist()) == sorted(set(ids)) and torch.equal(sums, dense[torch.from_numpy(unique)])


def test_a_push_of_duplicates_is_one_step_with_their_sum():
    one, other = table(), table()
    one.push([3, 3, 5], torch.tensor([[1.0], [2.0], [4.0]]).double().expand(3, 3), lr=0.1, scale=0.5)
    other.push([5, 3], torch.tensor([[2.0], [1.5]]).double().expand(2, 3), lr=0.1)
    assert same(one.state(), other.state()) and one.state()["steps"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_the_order_of_ids_does_not_matter_and_gradients_stay(name):
    one, other = table(name, rows=50), table(name, rows=50)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randperm(50, generator=generator)[:20]
        gradients = torch.randn(20, 3, dtype=torch.float64, generator=generator)
        before = gradients.clone()
        one.push(ids, gradients, lr=0.1, scale=0.3)
        shuffled = torch.randperm(20, generator=generator)
        other.push(ids[shuffled], gradients[shuffled], lr=0.1, scale=0.3)
        assert torch.equal(gradients, before)
    assert same(one.state(), other.state())


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_rows_that_are_not_pushed_stay_bit_for_bit_and_shards_step_alike(name):
    whole, shards = table(name), [table(name, ids=range(shard, 10, 3)) for shard in range(3)]
    whole.push(np.arange(10), ones(10), lr=0.1)
    before = whole.state()
    for _ in range(3):
        whole.push([2, 7], ones(2), lr=0.1)
    after, rest = whole.state(), [0, 1, 3, 4, 5, 6, 8, 9]
    for key in before:
        assert torch.equal(before[key][rest], after[key][rest])
    assert not torch.equal(before["values"][[2, 7]], after["values"][[2, 7]])
    for shard, each in enumerate(shards):
        each.push(np.arange(shard, 10, 3), ones(len(each.owned)), lr=0.1)
        for number in {2, 7} & set(each.owned):
            for _ in range(3):
                each.push([number], ones(1), lr=0.1)
        assert same(each.state(), {key: value[shard::3] for key, value in after.items()})


def _errors():
    nan, wide = ones(2) * 1, 2**31
    nan[1, 1] = math.nan
    opposite = torch.tensor([[math.inf] * 3, [-math.inf] * 3], dtype=torch.float64)
    rows = "it has rows 0 to 9"
    yield lambda t: t.rows([9, 10]), f"table items: id 10 is out of range, {rows}"
    yield lambda t: t.rows([9, -1, 10]), f"table items: id -1 is out of range, {rows}"
    yield lambda t: t.rows([8, wide]), f"table items: id {wide} is out of range, {rows}"
    yield lambda t: t.push([8, 2**40], ones(2), lr=1), f"table items: id {2**40} is out of range, {rows}"
    yield lambda t: t.rows([0, 1]), "table items: id 1 belongs to another shard, this one has rows 0 to 8 in steps of 2"
    yield lambda t: t.rows([0.5]), "table items: ids are float64 (1,); int32 or int64 in one dimension would do"
    yield lambda t: t.rows([[0]]), "table items: ids are int64 (1, 1); int32 or int64 in one dimension would do"
    yield lambda t: t.rows([2**70]), "table items: ids are object (1,); int32 or int64 in one dimension would do"
    yield lambda t: t.push([6, 8], ones(3), lr=1), "table items: gradients of shape (3, 3) for 2 ids, not (2, 3)"
    yield lambda t: t.push([6], ones(1, 4), lr=1), "table items: gradients of shape (1, 4) for 1 ids, not (1, 3)"
    yield (
        lambda t: t.push([6], ones(1).float(), lr=1),
        "table items: gradients of torch.float32, its rows are torch.float64",
    )
    yield lambda t: t.push([6], [[1.0] * 3], lr=1), "table items: gradients of list, its rows are torch.float64"
    yield lambda t: t.push([8, 6], nan, lr=1), "table items: id 6 has a gradient with NaN or infinity"
    yield lambda t: t.push([8, 8], opposite, lr=1), "table items: id 8 has a gradient with NaN or infinity"
    yield (
        lambda t: t.push([6, 8], ones(2) * 1e300, lr=1, scale=1e10),
        "table items: id 6 has a gradient with NaN or infinity",
    )
    yield lambda t: t.rows([2, 6, 8, 8]), "table items: id 8 would be a row too many, it holds 3 of at most 4"
    yield (
        lambda t: t.push([8, 0, 6], ones(3), lr=1),
        "table items: id 6 would be a row too many, it holds 3 of at most 4",
    )


@pytest.mark.parametrize("act, message", list(_errors()))
def test_errors_name_the_first_id_and_change_nothing(act, message):
    items = table(ids=(0, 2), max_rows=4)
    items.push([0, 4, 2], ones(3), lr=0.1)
    before = items.state()
    with pytest.raises(TableError) as caught:
        act(items)
    assert str(caught.value) == message and isinstance(caught.value, ValueError)
    assert same(items.state(), before) and items.num_touched == 3
    items.push([8], ones(1), lr=0.1)  # one more still fits
    assert items.num_touched == 4


def test_finite_gradients_whose_sum_overflows_are_fine_and_the_check_can_be_off():
    items = table("sgd", dtype=torch.float32)
    items.push([0, 1], ones(2, dtype=torch.float32) * 3e38, lr=1e-38)
    loose = table("sgd", check_finite=False)
    loose.push([0], ones(1) * math.nan, lr=1.0)
    assert loose.rows([0]).isnan().all()


@pytest.mark.parametrize(
    "wrong, what",
    [
        ({"rows": 0}, "0 rows"),
        ({"rows": 2**40 + 1}, "1099511627777 rows"),
        ({"width": 0}, "width 0"),
        ({"dtype": torch.int64}, "rows of torch.int64"),
        ({"max_rows": 0}, "max_rows 0"),
        ({"ids": range(5, 12)}, "does not lie within rows 0 to 9"),
        ({"ids": (-1, 2)}, "does not lie within rows 0 to 9"),
        ({"ids": (0, 0)}, "does not lie within rows 0 to 9"),
        ({"ids": range(9, 0, -1)}, "does not lie within rows 0 to 9"),
    ],
)
def test_a_table_that_cannot_be_is_refused(wrong, what):
    with pytest.raises(TableError, match=what):
        table(**wrong)


def test_a_huge_table_costs_what_is_touched_and_a_shard_may_own_nothing():
    huge = table("adagrad", rows=2**31 + 100, width=16, dtype=torch.float32)
    huge.push([2**31 + 99, 0], ones(2, 16, torch.float32), lr=0.1)
    assert huge.touched().tolist() == [0, 2**31 + 99] and huge.nbytes_touched == 2 * (2 * 64 + 8)
    assert huge.rows([2**31 + 99]).data_ptr() and huge._memory.arrays["values"].ctypes.data % 64 == 0
    nothing = table(rows=2, ids=(2, 3))
    with pytest.raises(TableError, match="id 1 belongs to another shard, this one has rows none"):
        nothing.rows([1])


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_million_rows_take_memory_for_the_touched_ones_only():
    told = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    grown, touched, nbytes = map(int, told.stdout.split())
    assert touched == 200_000 and nbytes == 200_000 * (64 + 64 + 4)
    assert 200_000 * 128 < grown < 1.3 * 200_000 * 128 + 4 * 10_000_000 + 4e6


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_a_table_goes_on_from_its_state_as_if_never_stopped(name):
    one, other = table(name), table(name)
    one.push([8, 2, 5], ones(3), lr=0.1)
    other.push([0, 1], ones(2), lr=0.1)
    state = one.state()
    shuffled = {key: value[[2, 0, 1]] for key, value in state.items()}
    other.prepare_state(shuffled)()
    assert same(other.state(), state)
    for each in (one, other):
        each.push([2, 9], ones(2), lr=0.2)
    assert same(one.state(), other.state())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    items = table(ids=(0, 2), max_rows=3)
    items.push([4], ones(1), lr=0.1)
    before = items.state()
    wrong = [
        {key: value for key, value in before.items() if key != "steps"},
        before | {"ids": torch.tensor([3])},
        before | {"ids": torch.tensor([10])},
        before | {"values": before["values"].float()},
        before | {"values": before["values"][:, :2]},
        {key: torch.cat([value, value]) for key, value in before.items()},
        {key: torch.cat([value] * 4) for key, value in before.items()} | {"ids": torch.tensor([0, 2, 4, 6])},
    ]
    for state in wrong:
        with pytest.raises(TableError):
            items.prepare_state(state)()
        assert same(items.state(), before)


def _segments(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, dtype=dtype, generator=generator) for name, shape in SHAPES.items()}


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("make", [_sgd, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dense_table_moves_as_plain_torch_and_untouched_segments_rest(make, dtype):
    dense = DenseTable(_segments(dtype), make)
    plain = {name: torch.nn.Parameter(tensor) for name, tensor in _segments(dtype).items()}
    optimizer = make(list(plain.values()))
    generator = torch.Generator().manual_seed(1)
    for touched in (None, ["a.weight"], {"a.bias", "a.weight"}, [], None):
        flat = torch.randn(dense.values.shape, dtype=dtype, generator=generator)
        before = flat.clone()
        for name, parameter in plain.items():
            chosen = touched is None or name in touched
            gradient = flat[dense.places[name]].view(SHAPES[name]).clone()
            parameter.grad = gradient.mul_(1.0 / 7) if chosen else None
        for group in optimizer.param_groups:
            group["lr"] = 0.03
        optimizer.step()
        dense.step(flat * (1.0 / 7), touched=touched, lr=0.03)
        assert torch.equal(flat, before)
        for name, parameter in plain.items():
            assert torch.equal(dense.values[dense.places[name]].view(SHAPES[name]), parameter)
            assert dense.parameters[name].data_ptr() % 64 == 0


def test_a_dense_table_refuses_what_does_not_fit_and_keeps_its_values():
    dense = DenseTable(_segments(), _sgd)
    before = dense.values.clone()
    good, bad = torch.ones_like(dense.values), torch.ones_like(dense.values)
    bad[dense.places["a.bias"]] = math.nan
    cases = [
        (good[1:], {}, r"gradients torch.float64 \(31,\), not torch.float64 \(32,\)"),
        (good.float(), {}, "gradients torch.float32"),
        (good, {"touched": ["c"]}, "there is no segment c"),
        (bad, {}, "the gradient of a.bias holds NaN or infinity"),
    ]
    for gradients, more, message in cases:
        with pytest.raises(TableError, match=message):
            dense.step(gradients, **more)
        assert torch.equal(dense.values, before)
    dense.step(bad, touched=["a.weight"])
    assert not torch.equal(dense.values, before)
    with pytest.raises(TableError, match="segments of one dtype are needed, not of torch.float32, torch.float64"):
        DenseTable({"a": torch.ones(1), "b": torch.ones(1).double()}, _sgd)
