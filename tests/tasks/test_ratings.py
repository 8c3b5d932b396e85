"""The task `ratings`: which ratings are held out, what a row holds, its figures, and what the built-in ones teach."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from hpctrain.tasks.load import build_task
from hpctrain.tasks.ratings import Ratings
from hpctrain.tasks.table import Table
from tests.train.toys import run

NAN, INF = math.nan, math.inf
# users 3, 5, 9 become 0, 1, 2; items 10, 20, 30, 40 become 0, 1, 2, 3
TINY = """userId,movieId,rating,timestamp
9,40,4.0,500
3,20,1.0,200
3,10,2.0,300
5,30,3.0,100
3,40,5.0,300
9,10,2.5,501
9,40,3.5,400
"""


@pytest.fixture
def tiny(tmp_path) -> str:
    (tmp_path / "ratings.csv").write_text(TINY)
    return str(tmp_path / "ratings.csv")


@pytest.fixture(scope="module")
def movielens(tmp_path_factory) -> Ratings:
    """The task on the built-in ratings, read once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        task = Ratings()
        task.prepare()
    return task


def build(task: Ratings, dtype=torch.float32) -> nn.Sequential:
    """With new embeddings as tables() has them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(factory() for factory in task.layers())).to(dtype)
    for name, table in task.tables().items():
        nn.init.normal_(model.get_parameter(name.removeprefix("layers.")), std=table.std)
    return model


def batch(task: Ratings, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = task.dataset(split)
    return default_collate([rows[index] for index in range(len(rows))])


def every_pair(task: Ratings) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows to train on, as `batch` has them, but read in one go."""
    rows = task.dataset("train")
    pairs, ratings = (torch.from_numpy(array.read(0, len(rows))).unsqueeze(1) for array in (rows.pairs, rows.ratings))
    for index in (0, 77_777, len(rows) - 1):
        assert rows[index][0].equal(pairs[index]) and rows[index][1].equal(ratings[index])
    return pairs, ratings


def test_the_latest_rating_of_each_user_is_held_out(tiny):
    """Of the equal times of user 3 the later row counts; user 5 has one rating, which is trained on."""
    task = Ratings(data=tiny, negatives=1)
    inputs, targets = batch(task, "train")
    assert inputs.tolist() == [[[2, 3]], [[0, 1]], [[0, 0]], [[1, 2]], [[2, 3]]]
    assert targets.tolist() == [[4.0], [1.0], [2.0], [3.0], [3.5]]
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.float32)
    inputs, targets = batch(task, "eval")
    assert inputs[:, 0].tolist() == [[0, 3], [2, 0]] and targets[:, 0].tolist() == [5.0, 2.5]
    assert inputs.shape == (2, 2, 2) and targets.dtype == torch.float32
    assert inputs[0, 1].tolist() == [0, 2]  # the only item that user 3 did not rate
    assert inputs[1, 1, 0] == 2 and inputs[1, 1, 1] in (1, 2)
    assert targets[:, 1].isnan().all()


def test_without_times_the_last_row_is_held_out(tmp_path):
    (tmp_path / "r.csv").write_text("user,item,rating\n1,1,1\n1,2,2\n2,1,3\n1,3,4\n")
    task = Ratings(data=str(tmp_path / "r.csv"))
    assert batch(task, "train")[1].flatten().tolist() == [1.0, 2.0, 3.0]
    assert batch(task, "eval")[1][:, 0].tolist() == [4.0]


def test_a_row_is_filled_up_where_a_user_left_few_items_unrated(tiny):
    """User 3 left one of 4 items, user 9 two: the rest repeats the item itself, and counts for nothing."""
    task = Ratings(data=tiny, negatives=4)
    inputs, targets = batch(task, "eval")
    assert inputs[0].tolist() == [[0, 3], [0, 2], [0, 3], [0, 3], [0, 3]]
    assert [str(value) for value in targets[0].tolist()] == ["5.0", "nan", "inf", "inf", "inf"]
    assert sorted(inputs[1, 1:3, 1].tolist()) == [1, 2] and inputs[1, 3:].tolist() == [[2, 0], [2, 0]]
    assert [str(value) for value in targets[1].tolist()] == ["2.5", "nan", "nan", "inf", "inf"]
    assert task.baseline()["hit_rate_at_10"] == 1.0


def test_who_rated_everything_has_no_hit_rate(tmp_path):
    (tmp_path / "r.csv").write_text("user,item,rating\n1,1,1\n1,2,2\n")
    task = Ratings(data=str(tmp_path / "r.csv"), negatives=2)
    assert task.baseline() == {"rmse": 1.0}
    inputs, targets = batch(task, "eval")
    assert inputs.tolist() == [[[0, 1]] * 3] and targets.tolist() == [[2.0, INF, INF]]
    outputs = torch.zeros(1, 3)
    assert task.metric(outputs, targets) == {"loss": (4.0, 1), "hit_rate_at_10": (0.0, 0)}


def test_negatives_are_never_rated_all_different_and_always_the_same(movielens):
    inputs, targets = batch(movielens, "eval")
    assert inputs.shape == (671, 100, 2) and targets.shape == (671, 100)
    assert targets[:, 1:].isnan().all() and targets[:, 0].isfinite().all()
    train, _ = every_pair(movielens)
    rated = {tuple(pair) for pair in torch.cat([train[:, 0], inputs[:, 0]]).tolist()}
    assert len(rated) == 100_004
    assert not rated & {tuple(pair) for pair in inputs[:, 1:].flatten(0, 1).tolist()}
    assert (inputs[..., 0] == torch.arange(671)[:, None]).all()
    assert all(len(set(row)) == 100 for row in inputs[..., 1].tolist())
    assert len(inputs[:, 1:, 1].unique()) == pytest.approx(9066, rel=0.01)  # of all items, with equal chances
    again = pickle.loads(pickle.dumps(movielens.dataset("eval")))
    for index in (670, 3, 3):
        assert torch.equal(again[index][0], inputs[index])


def test_the_built_in_ratings_are_split(movielens):
    assert (len(movielens.dataset("train")), len(movielens.dataset("eval"))) == (99_333, 671)
    model = build(movielens)
    assert {name: tuple(each.shape) for name, each in model[0].named_parameters()} == {
        "users.weight": (671, 16),
        "items.weight": (9066, 16),
    }
    for split, size in (("train", 99_333), ("eval", 671)):
        for index in (-1, size):
            with pytest.raises(IndexError):
                movielens.dataset(split)[index]


def test_a_rating_is_predicted_from_user_item_and_product(tiny):
    task = Ratings(data=tiny, width=3, hidden=5)
    model = build(task, torch.float64)
    pairs = torch.tensor([[[0, 3], [0, 1]], [[2, 0], [2, 2]]])
    users, items = model[0].users.weight, model[0].items.weight
    for row, column in ((0, 0), (0, 1), (1, 1)):
        user, item = users[pairs[row, column, 0]], items[pairs[row, column, 1]]
        hidden = nn.functional.gelu(model[1].linear(torch.cat([user, item, user * item])))
        by_hand = (model[2].linear.weight[0] * hidden).sum() + model[2].linear.bias[0] + (4 + 1 + 2 + 3 + 3.5) / 5
        assert model(pairs)[row, column].item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert model(pairs).shape == (2, 2) and model(pairs).dtype == torch.float64
    assert model[0](pairs).shape == (2, 2, 9)


def test_in_bfloat16_the_mean_is_not_rounded(tiny):
    model = build(Ratings(data=tiny))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(torch.tensor([[[0, 3], [0, 1]]]))
    assert outputs.dtype == torch.float32
    assert (outputs * 64 != (outputs * 64).round()).all()


def test_every_weight_has_a_gradient_that_is_no_rounding_noise(movielens):
    model = build(movielens, torch.float64)
    inputs, targets = (part[:2000] for part in every_pair(movielens))
    loss, count = movielens.loss(model(inputs), targets.double())
    (loss / count).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.abs().flatten()
        assert gradient[gradient > 0].min() > 1e-12, name


def test_tables_name_the_embeddings_and_their_ids(tiny):
    task = Ratings(data=tiny)
    names = dict(build(task).named_parameters())
    pairs = torch.tensor([[[0, 3], [0, 1]], [[2, 0], [2, 2]]])
    tables = task.tables()
    assert {f"layers.{name}" for name in names} > tables.keys()
    assert tables["layers.0.users.weight"].ids(pairs).tolist() == [[0, 0], [2, 2]]
    assert tables["layers.0.items.weight"].ids(pairs).tolist() == [[3, 1], [0, 2]]
    assert {table.std for table in tables.values()} == {0.1}
    assert Table(len).std == 1.0


def test_loss_and_metric_by_hand():
    """Rows: a hit, which 9 others beat; no hit, which a tenth equals; a NaN of its own; a NaN beside it."""
    task = Ratings()
    targets = torch.full((4, 12), NAN)
    targets[:, 0] = torch.tensor([4.0, 3.0, 1.0, 2.0])
    targets[:, 11] = INF  # a filler, which beats nothing
    outputs = torch.full((4, 12), 9.0)
    outputs[:, 0] = torch.tensor([3.0, 5.0, NAN, 2.5])
    outputs[0, 10] = 2.99
    outputs[1, 10] = 5.0
    outputs[3, 1:10], outputs[3, 10] = 1.0, NAN
    counted = [0, 1, 3]
    loss, count = task.loss(outputs[counted], targets[counted])
    assert (loss.item(), count) == (1.0 + 4.0 + 0.25, 3)
    metric = task.metric(outputs[counted], targets[counted])
    assert metric == {"loss": (5.25, 3), "hit_rate_at_10": (2.0, 3)}
    assert task.metric(outputs, targets)["hit_rate_at_10"] == (2.0, 4)
    assert math.isnan(task.metric(outputs, targets)["loss"][0])


@pytest.mark.parametrize("num_others, better, equal, hit", [(20, 9, 0, 1), (20, 9, 1, 0), (20, 0, 10, 0), (9, 0, 9, 1)])
def test_equal_predictions_count_against_a_hit(num_others, better, equal, hit):
    outputs = torch.tensor([[3.0, *[4.0] * better, *[3.0] * equal, *[2.0] * (num_others - better - equal)]])
    targets = torch.tensor([[5.0, *[NAN] * num_others]])
    assert Ratings().metric(outputs, targets)["hit_rate_at_10"] == (float(hit), 1)
    outputs[0, 0] = NAN
    assert Ratings().metric(outputs, targets)["hit_rate_at_10"] == (0.0, 1)


def test_items_without_a_rating_have_a_gradient_of_zero():
    outputs = torch.tensor([[1.0, 2.0, INF, 4.0]], requires_grad=True)
    loss, count = Ratings().loss(outputs, torch.tensor([[3.0, NAN, NAN, INF]]))
    loss.backward()
    assert (loss.item(), count, outputs.grad.tolist()) == (4.0, 1, [[-4.0, 0.0, 0.0, 0.0]])
    outputs = torch.ones(1, 2, requires_grad=True)
    loss, count = Ratings().loss(outputs, torch.full((1, 2), NAN))
    loss.backward()
    assert (loss.item(), count, outputs.grad.tolist()) == (0.0, 0, [[0.0, 0.0]])


def test_held_out_rows_may_be_trained_on(tiny):
    task = Ratings(data=tiny, negatives=3)
    model, (inputs, targets) = build(task), batch(task, "eval")
    loss, count = task.loss(model(inputs), targets)
    loss.backward()
    assert count == 2 and all(each.grad.isfinite().all() for each in model.parameters())


def test_figures_show_the_root_of_the_mean():
    task = Ratings()
    assert task.figures({"loss": 2.25, "hit_rate_at_10": 0.5}) == {"rmse": 1.5, "hit_rate_at_10": 0.5}
    assert task.figures({"loss": 4.0}) == {"rmse": 2.0} and task.figures({}) == {}
    assert math.isnan(task.figures({"loss": NAN})["rmse"])


def test_the_baseline_is_the_mean_rating_and_a_random_order(tiny, movielens):
    mean = (4 + 1 + 2 + 3 + 3.5) / 5
    rmse = math.sqrt(((5 - mean) ** 2 + (2.5 - mean) ** 2) / 2)
    assert Ratings(data=tiny).baseline() == {"rmse": pytest.approx(rmse), "hit_rate_at_10": 1.0}
    assert movielens.baseline() == {"rmse": pytest.approx(1.0945, abs=1e-4), "hit_rate_at_10": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"width": 0}, "--task-option width=0: should be at least 1"),
        ({"hidden": 0}, "--task-option hidden=0: should be at least 1"),
        ({"negatives": 0}, "--task-option negatives=0: should be at least 1"),
        ({"users": 2}, "--task-option users=2: should be at least 3, as many as there are in the data"),
        ({"items": 0}, "--task-option items=0: should be at least 4, as many as there are in the data"),
    ],
)
def test_an_option_out_of_range_is_named(tiny, options, line):
    with pytest.raises(ValueError) as caught:
        Ratings(data=tiny, **options).prepare()
    assert str(caught.value) == line


def test_tables_may_be_larger_than_the_data(tiny):
    task = Ratings(data=tiny, users=100, items=50, negatives=9)
    model = build(task)
    assert (len(model[0].users.weight), len(model[0].items.weight)) == (100, 50)
    assert batch(task, "eval")[0].amax((0, 1)).tolist() == [2, 3]  # candidates are items that somebody rated


def test_the_command_line_builds_it(tiny):
    options = {"width": "8", "negatives": "5", "users": "70", "items": "none"}
    task = build_task("hpctrain.tasks.ratings:Ratings", options, tiny)
    assert (task.width, task.negatives, task.users, task.items) == (8, 5, 70, None)
    assert task.dataset("train") is task.dataset("train")


def test_pieces_of_a_batch_give_what_the_whole_gives(tiny):
    whole, pieces = (
        run(Ratings(data=tiny), steps=5, optimizer="adam", global_batch_size=4, num_microbatches=number)[:2]
        for number in (1, 4)
    )
    assert pieces[0] == pytest.approx(whole[0], rel=1e-10, abs=0)
    for name, weight in whole[1].items():
        torch.testing.assert_close(pieces[1][name], weight, rtol=0, atol=1e-10)


def test_a_short_training_beats_both_baselines(movielens):
    pairs, ratings = every_pair(movielens)
    model, order = build(movielens), np.random.default_rng(0).permutation(len(pairs))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(300):
        chosen = order[step * 256 : (step + 1) * 256]
        optimizer.zero_grad()
        loss, count = movielens.loss(model(pairs[chosen]), ratings[chosen])
        (loss / count).backward()
        optimizer.step()
    inputs, targets = batch(movielens, "eval")
    with torch.no_grad():
        metric = movielens.metric(model(inputs), targets)
    figures = movielens.figures({name: total / count for name, (total, count) in metric.items()})
    baseline = movielens.baseline()
    assert figures["rmse"] < baseline["rmse"] - 0.08
    assert figures["hit_rate_at_10"] > baseline["hit_rate_at_10"] + 0.08
