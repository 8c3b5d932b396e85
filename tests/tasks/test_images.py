"""The task `images`: its network, its loss and yardstick, and what the built-in digits teach it."""

import hashlib
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from hpctrain.tasks.convnet import Block, layer_factories
from hpctrain.tasks.images import Images
from hpctrain.tasks.load import build_task
from hpctrain.tasks.pictures import digits_file
from tests.train.toys import run

SHAPES = [(1, 8, 8), (3, 64, 64), (1, 28, 28), (3, 4, 4), (2, 5, 9), (4, 33, 7)]
SMALL = {"num_blocks": 2, "width": 4}


def build(factories, dtype=torch.float32) -> nn.Sequential:
    layers = []
    for number, factory in enumerate(factories):
        torch.manual_seed(number)
        layers.append(factory())
    return nn.Sequential(*layers).to(dtype)


def batch(task: Images, rows, split="train"):
    dataset = task.dataset(split)
    return default_collate([dataset[row] for row in rows])


def sides(model: nn.Sequential, shape) -> list[tuple[int, int]]:
    """Height and width behind each layer but the head."""
    x, found = torch.randn(2, *shape), []
    for layer in model[:-1]:
        x = layer(x)
        found.append(tuple(x.shape[2:]))
    return found


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_picture_becomes_scores(shape, num_blocks):
    model = build(layer_factories(shape, 5, num_blocks, 8, 0.0))
    assert len(model) == num_blocks + 2
    assert model(torch.randn(3, *shape)).shape == (3, 5)
    assert min(map(min, sides(model, shape))) >= 2


def test_the_built_in_model_halves_twice_and_doubles_its_channels():
    model = build(Images().layers())
    assert len(model) == 8
    assert sides(model, (1, 8, 8)) == [(8, 8), (8, 8), (8, 8), (4, 4), (4, 4), (2, 2), (2, 2)]
    assert [block.conv2.out_channels for block in model if isinstance(block, Block)] == [16, 16, 32, 32, 64, 64]


def test_no_convolution_has_a_bias_and_a_norm_follows_each():
    modules = list(build(Images().layers()).modules())
    convolutions = [each for each in modules if isinstance(each, nn.Conv2d)]
    norms = [each for each in modules if isinstance(each, nn.GroupNorm)]
    assert len(convolutions) == len(norms) == 1 + 6 * 2 + 2
    assert all(each.bias is None for each in convolutions)
    assert [each.out_channels for each in convolutions] == [each.num_channels for each in norms]


def test_a_block_is_two_convolutions_beside_a_way_past_them():
    block = build([lambda: Block(8, 16, 2, 0.0, 0.5)], torch.float64)[0]
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    inner = block.norm2(block.conv2(block.norm1(block.conv1(x)).clamp(min=0)))
    past = block.past[1](block.past[0](x))
    assert torch.equal(block(x), (inner + past).clamp(min=0))
    assert block(x).shape == (2, 16, 3, 3)
    same = build([lambda: Block(8, 8, 1, 0.0, 0.5)], torch.float64)[0]
    inner = same.norm2(same.conv2(same.norm1(same.conv1(x)).clamp(min=0)))
    assert torch.equal(same(x), (inner + x).clamp(min=0))


@pytest.mark.parametrize("num_blocks", [1, 6])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 4), (1, 28, 28)], ids=str)
def test_no_weight_has_a_gradient_of_zero_or_of_rounding_noise(shape, num_blocks):
    model = build(layer_factories(shape, 5, num_blocks, 8, 0.0), torch.float64)
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(64, *shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (64,), generator=generator)
    loss, count = Images().loss(model(pictures), labels)
    (loss / count).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.abs().flatten()
        alive = gradient > 0  # a ReLU that no row opens gives an exact zero, which harms no optimizer
        assert alive.double().mean() > 0.8 and gradient[alive].min() > 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_any_batch_gives_the_sum_of_its_rows(rows, dtype):
    task = Images(**SMALL)
    model = build(task.layers(), dtype)
    pictures, labels = batch(task, range(rows))
    outputs = model(pictures.to(dtype))
    assert outputs.dtype == dtype and outputs.shape == (rows, 10)
    loss, count = task.loss(outputs, labels)
    assert loss.shape == () and count == rows
    alone = [task.loss(model(pictures[[row]].to(dtype)), labels[[row]]) for row in range(rows)]
    assert [items for _, items in alone] == [1] * rows
    total = sum(each.item() for each, _ in alone)
    assert loss.item() == pytest.approx(total, rel=1e-12 if dtype == torch.float64 else 1e-5)
    by_hand = sum(-outputs[row].log_softmax(0)[labels[row]].item() for row in range(rows))
    assert loss.item() == pytest.approx(by_hand, rel=1e-12 if dtype == torch.float64 else 1e-5)


def test_the_metric_counts_the_rows_whose_own_class_scores_most():
    outputs = torch.tensor([[3.0, 0, 0], [0, 1, 2], [0, 5, 0], [1, 0, 2]])
    labels = torch.tensor([0, 1, 1, 2])
    task = Images(**SMALL)
    loss, count = task.loss(outputs, labels)
    assert task.metric(outputs, labels) == {"loss": (loss.item(), 4), "accuracy": (3.0, 4)}


def test_dropout_acts_in_training_only():
    task = Images(**SMALL, dropout=0.5)
    model, (pictures, _) = build(task.layers()), batch(task, range(4))
    assert not torch.equal(model(pictures), model(pictures))
    model.eval()
    assert torch.equal(model(pictures), model(pictures))
    assert torch.equal(model(pictures), build(Images(**SMALL).layers())(pictures))


def test_the_same_seeds_build_the_same_model():
    first, second = (build(Images().layers()).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_digits_are_split_by_tens_and_scaled():
    task = Images()
    train, held_out = task.dataset("train"), task.dataset("eval")
    assert (len(train), len(held_out)) == (1617, 180)
    table = np.loadtxt(digits_file(), delimiter=",")
    for dataset, index, row in (
        (held_out, 0, 0),
        (held_out, 179, 1790),
        (train, 0, 1),
        (train, 9, 11),
        (train, 1616, 1796),
    ):
        picture, label = dataset[index]
        assert picture.shape == (1, 8, 8) and picture.dtype == torch.float32
        assert label.shape == () and label.dtype == torch.int64 and label.item() == table[row, 64]
        np.testing.assert_allclose(picture.numpy().ravel() * 6.017 + 4.884, table[row, :64], atol=1e-5)
    pictures, labels = batch(task, range(1617))
    assert abs(pictures.mean().item()) < 0.01 and abs(pictures.std().item() - 1) < 0.01
    assert labels.unique().tolist() == list(range(10))
    for index in (-1, 1617):
        with pytest.raises(IndexError):
            train[index]


def test_an_item_may_be_changed_without_harm():
    dataset = Images().dataset("train")
    dataset[3][0].fill_(7)
    assert dataset[3][0].max() < 3


def test_the_baseline_is_the_nearest_mean_picture():
    table = np.loadtxt(digits_file(), delimiter=",")
    held_out = np.arange(len(table)) % 10 == 0
    x, y = table[:, :64], table[:, 64]
    means = np.stack([x[~held_out & (y == digit)].mean(0) for digit in range(10)])
    right = [np.argmin([np.sum((row - mean) ** 2) for mean in means]) == label for row, label in zip(x, y)]
    assert Images().baseline() == {"accuracy": pytest.approx(np.mean(np.array(right)[held_out]))}
    pictures, labels = batch(Images(), [0])
    assert Images().baseline().keys() < Images().metric(build(Images().layers())(pictures), labels).keys()


def test_the_digest_is_that_of_the_file():
    assert Images().data_sha256() == hashlib.sha256(digits_file().read_bytes()).hexdigest()
    assert Images().data_stamp() == Images().data_stamp()


def test_a_short_run_beats_the_baseline():
    task = Images(num_blocks=3, width=8)
    _, _, executor = run(task, precision="float32", steps=120, optimizer="adamw", lr=5e-3, global_batch_size=32)
    pictures, labels = batch(task, range(180), "eval")
    with executor.stage.evaluating():
        correct, count = task.metric(executor.stage.forward(pictures, 0, 0), labels)["accuracy"]
    assert correct / count > task.baseline()["accuracy"] + 0.03


def test_pieces_of_a_batch_give_what_the_whole_gives():
    """Nothing in the network mixes rows."""
    task = Images(**SMALL)
    whole, pieces = (
        run(task, steps=5, optimizer="adam", global_batch_size=12, num_microbatches=number)[:2] for number in (1, 4)
    )
    assert pieces[0] == pytest.approx(whole[0], rel=1e-10, abs=0)
    for name, weight in whole[1].items():
        torch.testing.assert_close(pieces[1][name], weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_blocks": 0}, "--task-option blocks=0: should be at least 1"),
        ({"width": 1}, "--task-option width=1: should be at least 2"),
        ({"dropout": 1.0}, "--task-option dropout=1.0: should be at least 0 and below 1"),
        ({"dropout": math.nan}, "--task-option dropout=nan: should be at least 0 and below 1"),
        ({"size": 8}, "--task-option size=8: should be left out: only pictures in a folder are resized"),
        ({"channels": 1}, "--task-option channels=1: should be left out: only pictures in a folder are converted"),
    ],
)
def test_an_option_out_of_range_is_named(options, line):
    with pytest.raises(ValueError) as caught:
        Images(**options)
    assert str(caught.value) == line


def test_the_command_line_builds_it():
    task = build_task("images", {"blocks": "2", "width": "8", "size": "none"})
    assert (task.num_blocks, task.width, task.size) == (2, 8, None)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(ValueError) as caught:
        Images()
    said = '--task images: the built-in pictures come with scikit-learn: pip install "hpctrain[data]"; '
    assert str(caught.value) == said + "or name a folder by --data"
