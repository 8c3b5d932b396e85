"""A row pushed in every step moves as torch's optimizer moves it; one pushed at times counts its own steps."""

import pytest
import torch

from hpctrain.model.row_optimizers import ROW_OPTIMIZERS, build_row_optimizer
from hpctrain.model.tables import EmbeddingTable
from hpctrain.train.optimizer import build_optimizer

TORCH = [name for name in ROW_OPTIMIZERS if name != "rowwise-adagrad"]
RATES = [0.1, 0.1, 0.03, 0.2, 0.01, 0.1]


def table(name, dtype, weight_decay, rows=6):
    optimizer = build_row_optimizer(name, momentum=0.8, weight_decay=weight_decay)
    return EmbeddingTable("items", rows, 5, 1, 0.3, optimizer, dtype)


def plain(name, weights, weight_decay):
    parameter = torch.nn.Parameter(weights.clone())
    return parameter, build_optimizer(name, [parameter], 0.1, 0.8, weight_decay)


def gradients(dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 5, dtype=dtype, generator=generator) for _ in RATES]


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TORCH)
def test_rows_pushed_in_every_step_equal_torch_bit_for_bit(name, dtype, weight_decay):
    items, ids = table(name, dtype, weight_decay), torch.arange(6)
    parameter, optimizer = plain(name, items.rows(ids), weight_decay)
    for rate, gradient in zip(RATES, gradients(dtype)):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = gradient * (1.0 / 3)
        optimizer.step()
        items.push(ids, gradient, lr=rate, scale=1.0 / 3)
    assert torch.equal(items.rows(ids), parameter.detach())
    slots = items.state()
    for slot, state in optimizer.state[parameter].items():
        assert torch.equal(slots[slot], state) if slot in slots else slot == "step"


@pytest.mark.parametrize("name", TORCH)
def test_an_embedding_trained_by_its_rows_equals_a_dense_one(name):
    """Rows that a batch does not hold have no step, so each row is a torch parameter with an optimizer of its own."""
    items = table(name, torch.float64, 0.02)
    rows = [plain(name, items.rows([number])[0], 0.02) for number in range(6)]
    generator = torch.Generator().manual_seed(5)
    for _ in range(12):
        ids = torch.randint(6, (7,), generator=generator)
        dense = torch.nn.Embedding.from_pretrained(items.rows(torch.arange(6)), freeze=False)
        looked_up = dense(ids)
        looked_up.retain_grad()
        (looked_up.sin() * torch.arange(35.0).view(7, 5)).sum().backward()
        items.push(ids, looked_up.grad, lr=0.1, scale=0.25)
        for number in ids.unique().tolist():
            rows[number][0].grad = dense.weight.grad[number] * 0.25
            rows[number][1].step()
    expected = torch.stack([parameter.detach() for parameter, _ in rows])
    torch.testing.assert_close(items.rows(torch.arange(6)), expected, rtol=1e-14, atol=1e-15)


def test_bias_correction_counts_a_rows_own_steps():
    items, (first, *_) = table("adam", torch.float64, 0.0), gradients(torch.float64)
    late, early = items.rows([4])[0], items.rows([1])[0]
    for _ in range(5):
        items.push([1], first[:1], lr=0.1)
    items.push([4], first[:1], lr=0.1)
    assert items.state()["steps"].tolist() == [5, 1]
    for number, start, steps in ((4, late, 1), (1, early, 5)):
        parameter, optimizer = plain("adam", start, 0.0)
        for _ in range(steps):
            parameter.grad = first[0].clone()
            optimizer.step()
        assert torch.equal(items.rows([number])[0], parameter.detach())
    assert (items.rows([4])[0] - late).abs().sub(0.1).abs().max() < 1e-6  # the first step of Adam is lr long


def test_bias_correction_after_very_many_steps_is_none():
    items = table("adam", torch.float64, 0.0)
    state = {key: value.clone() for key, value in _stepped(items).items()}
    state["steps"][:] = 10**6
    items.prepare_state(state)()
    parameter, optimizer = plain("adam", items.rows([0])[0], 0.0)
    optimizer.state[parameter] = {"step": torch.tensor(1e6), "exp_avg": state["exp_avg"][0].clone()}
    optimizer.state[parameter]["exp_avg_sq"] = state["exp_avg_sq"][0].clone()
    parameter.grad = torch.ones(5, dtype=torch.float64)
    optimizer.step()
    items.push([0], torch.ones(1, 5, dtype=torch.float64), lr=0.1)
    assert torch.equal(items.rows([0])[0], parameter.detach())


def _stepped(items):
    items.push([0], torch.ones(1, 5, dtype=torch.float64), lr=0.1)
    return items.state()


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
def test_rowwise_adagrad_has_one_accumulator_of_the_mean_square(weight_decay):
    items, ids = table("rowwise-adagrad", torch.float64, weight_decay), torch.arange(6)
    weights, accumulated = items.rows(ids), torch.zeros(6, 1, dtype=torch.float64)
    for rate, gradient in zip(RATES, gradients(torch.float64)):
        items.push(ids, gradient, lr=rate)
        gradient = gradient + weight_decay * weights
        accumulated += (gradient**2).sum(1, keepdim=True) / 5
        weights = weights - rate * gradient / (accumulated.sqrt() + 1e-10)
    torch.testing.assert_close(items.rows(ids), weights, rtol=1e-14, atol=1e-15)
    assert items.state()["sum"].shape == (6, 1)
    torch.testing.assert_close(items.state()["sum"], accumulated, rtol=1e-14, atol=0)
