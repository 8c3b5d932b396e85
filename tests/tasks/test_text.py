"""The text task: its yardstick, its units, its options, and a model that is causal and has no dead weight."""

import hashlib
import math

import pytest
import torch
from torch.utils.data import default_collate

from hpctrain.tasks.text import Text

SMALL = {"num_layers": 2, "width": 16, "num_heads": 2, "context": 8}


def build(task: Text, dtype=torch.float32) -> torch.nn.Sequential:
    layers = []
    for number, factory in enumerate(task.layers()):
        torch.manual_seed(number)
        layers.append(factory())
    return torch.nn.Sequential(*layers).to(dtype)


def batch(task: Text, rows, split="train"):
    dataset = task.dataset(split)
    return default_collate([dataset[row] for row in rows])


def test_the_built_in_text_gives_each_split_its_share():
    task = Text()
    train, held_out = len(task.dataset("train")), len(task.dataset("eval"))
    assert train > 5000 and 0.09 < held_out / (train + held_out) < 0.11


def test_the_digest_is_that_of_the_bytes(tmp_path):
    content = b"abcdefgh" * 40
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert Text(context=4, data=str(path)).data_sha256() == hashlib.sha256(content).hexdigest()


def slow_bigram_nats(content: bytes, context: int) -> float:
    """The obvious loop over bytes, with nothing of the code under test."""
    pairs, previous, single = {}, {}, {}
    block = 16 * context + 1
    total = count = 0
    for held_out in (False, True):
        for start in range(0, len(content), block):
            if (start // block % 10 == 0) != held_out:
                continue
            part = content[start : start + block]
            part = part[: (len(part) - 1) // context * context + 1]
            for a, b in zip(part, part[1:], strict=False):
                if held_out:
                    share = (single.get(b, 0) + 1) / (sum(single.values()) + 256)
                    total -= math.log((pairs.get((a, b), 0) + 5 * share) / (previous.get(a, 0) + 5))
                    count += 1
                else:
                    pairs[a, b] = pairs.get((a, b), 0) + 1
                    previous[a] = previous.get(a, 0) + 1
                    single[b] = single.get(b, 0) + 1
    return total / count


@pytest.mark.parametrize("size", [154, 700, 1500, 1517])
def test_the_baseline_equals_a_slow_loop(tmp_path, size):
    content = (b"She sells sea shells; \xc3\xa9t\xc3\xa9. " * 60)[: size - 3] + b"zq!"
    (tmp_path / "a.txt").write_bytes(content)
    task = Text(context=8, data=str(tmp_path / "a.txt"))
    nats = slow_bigram_nats(content, 8)
    assert task.baseline() == {
        "loss": pytest.approx(nats, rel=1e-12),
        "bits_per_byte": pytest.approx(nats / math.log(2), rel=1e-12),
    }


def test_the_baseline_has_the_names_of_the_metric():
    task = Text(**SMALL)
    inputs, targets = batch(task, [0])
    assert task.baseline().keys() == task.metric(build(task)(inputs), targets).keys()


def test_loss_is_a_sum_over_bytes_and_metric_its_two_units():
    task = Text(**SMALL)
    inputs, targets = batch(task, [0, 1, 2])
    outputs = build(task, torch.float64)(inputs)
    loss, count = task.loss(outputs, targets)
    rows = [-outputs[r, t].log_softmax(0)[targets[r, t]].item() for r in range(3) for t in range(8)]
    assert loss.shape == () and count == 24
    assert loss.item() == pytest.approx(sum(rows), rel=1e-12)
    bits = loss.item() / math.log(2)
    assert task.metric(outputs, targets) == {"loss": (loss.item(), 24), "bits_per_byte": (bits, 24)}


@pytest.mark.parametrize("changed", [0, 3, 7])
def test_a_byte_changes_no_output_before_it(changed):
    task = Text(**SMALL)
    model = build(task, torch.float64)
    inputs, _ = batch(task, [0, 1])
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    before, after = model(inputs), model(other)
    differs = (before != after).any(dim=2)
    assert not differs[:, :changed].any() and differs[:, changed:].all()


def test_attention_is_the_textbook_formula():
    task = Text(**SMALL)
    model = build(task, torch.float64)
    block, x = model[1], torch.randn(2, 8, 16, dtype=torch.float64)
    query, key, value = block.qkv(x).split(16, dim=2)
    expected = torch.zeros_like(x)
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
        expected[..., part] = scores.softmax(2) @ value[..., part]
    torch.testing.assert_close(block._attend(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [SMALL, {"num_layers": 1, "width": 4, "num_heads": 1, "context": 2}])
def test_no_weight_has_a_gradient_of_zero_or_of_rounding_noise(options):
    task = Text(**options)
    model = build(task, torch.float64)
    inputs, targets = batch(task, range(64))
    loss, count = task.loss(model(inputs), targets)
    (loss / count).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.abs()
        if name == "0.token.weight":
            unseen = torch.ones(256, dtype=torch.bool)
            unseen[inputs.unique()] = False
            assert (gradient[unseen] == 0).all()
            gradient = gradient[~unseen]
        assert gradient.min() > 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_any_batch_gives_the_sum_of_its_rows(rows, dtype):
    task = Text(**SMALL)
    model = build(task, dtype)
    inputs, targets = batch(task, range(rows))
    outputs = model(inputs)
    assert outputs.dtype == dtype and outputs.shape == (rows, 8, 256)
    loss, _ = task.loss(outputs, targets)
    alone = sum(task.loss(model(inputs[r : r + 1]), targets[r : r + 1])[0] for r in range(rows))
    torch.testing.assert_close(loss, alone, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0)
    assert loss.dtype == dtype


def test_initial_weights_follow_the_seed_of_their_layer_alone():
    task = Text(**SMALL)
    torch.manual_seed(2)
    alone = task.layers()[2]()
    for name, weight in build(task)[2].state_dict().items():
        assert torch.equal(weight, alone.state_dict()[name]), name
    torch.manual_seed(3)
    assert not torch.equal(alone.qkv.weight, task.layers()[2]().qkv.weight)


def test_dropout_acts_in_training_only():
    task = Text(**SMALL, dropout=0.5)
    model = build(task)
    inputs, _ = batch(task, [0])
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_a_few_steps_learn():
    task = Text(num_layers=1, width=16, num_heads=1, context=16)
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(40):
        inputs, targets = batch(task, range(8 * step, 8 * step + 8))
        loss, count = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append(loss.item() / count)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_the_sample_continues_the_held_out_text_and_is_the_same_each_time():
    task = Text(**SMALL)
    model, times = build(task), []

    def forward(tokens):
        times.append(tuple(tokens.shape))
        assert tokens.dtype == torch.int64
        return model(tokens)

    state = torch.random.get_rng_state()
    text = task.sample(forward)
    assert text.startswith('The "assert" sta') and text == task.sample(model)
    assert set(times) == {(1, 8)}, "more than the context was asked for"
    assert torch.equal(state, torch.random.get_rng_state()), "the sample drew from the generator of the training"


def test_the_sample_follows_the_scores():
    task = Text(**SMALL)

    def forward(tokens):
        scores = torch.full((1, tokens.shape[1], 256), -1e4)
        scores[0, torch.arange(tokens.shape[1]), (tokens[0] + 1) % 128] = 1e4
        return scores

    continued = task.sample(forward)[16:]
    letters = [chr((ord("a") + 1 + i) % 128) for i in range(200)]
    assert continued == "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in letters)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_layers": 0}, "--task-option layers=0: should be at least 1"),
        ({"width": 2}, "--task-option width=2: should be at least 4: a LayerNorm of fewer passes nothing on"),
        ({"num_heads": 3}, "--task-option heads=3: should be a divisor of width=64"),
        ({"num_heads": 0}, "--task-option heads=0: should be a divisor of width=64"),
        ({"context": 1}, "--task-option context=1: should be at least 2: attention over one byte is no choice"),
        ({"dropout": 1.0}, "--task-option dropout=1.0: should be at least 0 and below 1"),
        ({"dropout": math.nan}, "--task-option dropout=nan: should be at least 0 and below 1"),
    ],
)
def test_an_option_out_of_range_is_named(options, line):
    with pytest.raises(ValueError) as caught:
        Text(**options)
    assert str(caught.value) == line


def test_a_context_longer_than_the_built_in_text_allows_is_named():
    with pytest.raises(ValueError, match=r"^--task-option context=99999: should be smaller: it takes 1699985 bytes"):
        Text(context=99999)


def test_a_model_that_learnt_nothing_has_no_sample_but_its_prompt():
    task = Text(**SMALL)
    text = task.sample(lambda ids: torch.full((1, ids.shape[1], 256), float("nan")))
    assert len(text) == 16 and task.sample(lambda ids: torch.zeros(1, ids.shape[1], 256)).startswith(text)
