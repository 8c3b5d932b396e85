"""The rows of a loop of one's own: a step of n ranks is a step of one process, every row counts, and no two twice."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpctrain import Mesh, Sampler


def ranks(num_rows, size, **settings):
    places = [SimpleNamespace(data=SimpleNamespace(rank=rank, size=size)) for rank in range(size)]
    return [Sampler(num_rows, place, **settings) for place in places]


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("uneven", ("drop", "keep"))
def test_each_step_of_many_ranks_is_the_step_of_one_process(size, uneven):
    batch, num_rows = 3, 50
    one, many = ranks(num_rows, 1, seed=7)[0], ranks(num_rows, size, seed=7, uneven=uneven)
    for epoch in range(3):
        order, parts = list(one), [list(sampler) for sampler in many]
        assert [len(part) for part in parts] == [len(sampler) for sampler in many]
        for k in range(num_rows // (batch * size)):
            step = {row for part in parts for row in part[k * batch : (k + 1) * batch]}
            assert step == set(order[k * batch * size : (k + 1) * batch * size]), (epoch, k)
        everything = sorted(row for part in parts for row in part)
        if uneven == "keep":
            assert everything == list(range(num_rows))
            assert max(map(len, parts)) - min(map(len, parts)) == (num_rows % size > 0)
        else:
            assert everything == sorted(order[: num_rows - num_rows % size])
            assert len(set(map(len, parts))) == 1


def test_every_epoch_has_an_order_of_its_own_and_leaves_out_other_rows():
    sampler = ranks(10, 3, seed=1)[0]
    epochs = [list(sampler) for _ in range(20)]
    assert len({tuple(epoch) for epoch in epochs}) > 15
    left_out = set()
    for epoch in range(20):
        for each in (parts := ranks(10, 3, seed=1)):
            each.epoch = epoch
        left_out |= set(range(10)) - {row for part in parts for row in part}
    assert len(left_out) > 5
    again = ranks(10, 3, seed=1)[0]
    again.epoch = 13
    assert list(again) == epochs[13] and list(again) == epochs[14] and again.epoch == 15
    assert [list(ranks(10, 3, seed=2)[0])] != epochs[:1]


def test_without_shuffle_rows_ascend():
    assert [list(sampler) for sampler in ranks(5, 2, shuffle=False, uneven="keep")] == [[0, 2, 4], [1, 3]]
    assert [list(sampler) for sampler in ranks(5, 2, shuffle=False)] == [[0, 2], [1, 3]]


def test_it_serves_a_data_loader():
    data = TensorDataset(torch.arange(11))
    sampler = Sampler(data, Mesh(None), seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    epochs = [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(11))
    assert len(loader) == 3 and sampler.epoch == 2


def test_what_cannot_be_shared_out_is_refused_by_one_line():
    with pytest.raises(ValueError, match="2 rows for 3 ranks leave none to any of them; start fewer ranks, or uneven"):
        ranks(2, 3)
    assert [len(sampler) for sampler in ranks(2, 3, uneven="keep")] == [1, 1, 0]
    with pytest.raises(ValueError, match="uneven='pad': it is 'drop' or 'keep'"):
        ranks(2, 1, uneven="pad")
    with pytest.raises(ValueError, match="generator has no length"):
        Sampler((i for i in range(3)), Mesh(None))
    with pytest.raises(ValueError, match="2.5 is no integer; give a map-style data set or a number of rows"):
        ranks(2.5, 1)
    with pytest.raises(ValueError, match="-3 rows are less than none"):
        ranks(-3, 2, uneven="keep")
    for seed in (1.5, "1", None):
        with pytest.raises(ValueError, match=f"seed={seed!r} is no integer"):
            ranks(5, 1, seed=seed)


@pytest.mark.parametrize("integer", (np.int64, np.uint8, torch.tensor, np.array))
def test_integers_of_any_type_are_integers(integer):
    (sampler,), (expected,) = ranks(integer(11), 1, seed=integer(3)), ranks(11, 1, seed=3)
    assert len(sampler) == 11 and list(sampler) == list(expected)


@pytest.mark.mpi
def test_the_ranks_of_a_mesh_share_the_rows(comm):
    with Mesh(comm) as mesh:
        everybody = mesh.data.all_gather_json(list(Sampler(29, mesh, uneven="keep")))
    assert sorted(row for part in everybody for row in part) == list(range(29))
