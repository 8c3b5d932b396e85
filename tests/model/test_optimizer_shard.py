"""What of a model each replica's optimizer steps: every element on one of them, and the bits of a whole step."""

import pytest
import torch
from torch import nn

from hpctrain.comm.buffer import allocate
from hpctrain.config import OPTIMIZERS
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.optimizer_shard import OptimizerShard
from hpctrain.model.stage import Stage
from hpctrain.train.optimizer import build_optimizer, state_bytes
from hpctrain.train.which_update import flatten


class Odd(nn.Module):
    """A scalar, a matrix, nothing at all, and what is frozen."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))
        self.matrix = nn.Parameter(torch.randn(13, 7, dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(5, dtype=dtype), requires_grad=False)
        self.last = nn.Parameter(torch.randn(3, dtype=dtype))


def odd(dtype=torch.float32, bucket_bytes=100):
    torch.manual_seed(0)
    stage = Stage([Odd(dtype), nn.Linear(5, 2).to(dtype)])
    return stage, FlatGradients(stage.named_parameters(), allocate, bucket_bytes)


def shards_of(gradients, size):
    """Those of all replicas, on the one memory of this process."""
    weights = flatten(gradients)
    return [OptimizerShard(gradients, weights, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", (1, 2, 3, 4, 11, 200))
@pytest.mark.parametrize("bucket_bytes", (1, 100, 10**6))
def test_every_element_is_owned_once(size, bucket_bytes):
    stage, gradients = odd(bucket_bytes=bucket_bytes)
    before = {name: parameter.detach().clone() for name, parameter in stage.named_parameters().items()}
    shards = shards_of(gradients, size)
    for name, parameter in stage.named_parameters().items():
        assert torch.equal(parameter, before[name])
    for shard in shards:
        for name, part in shard.parameters.items():
            with torch.no_grad():
                part += 1.0
            shard.views[name] += 1.0
    for name, parameter in gradients.parameters.items():
        assert torch.equal(parameter, before[name] + 1.0) and (gradients.views[name] == 1.0).all(), name
    assert torch.equal(stage.layers[0].frozen, before["layers.0.frozen"])
    assert sum(part.numel() for shard in shards for part in shard.parameters.values()) == 13 * 7 + 1 + 3 + 12


@pytest.mark.parametrize("size", (1, 3, 4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_steps_of_all_shards_are_those_of_a_whole_optimizer(optimizer, dtype, size):
    (stage, gradients), (other, whole) = odd(dtype), odd(dtype)
    shards = shards_of(gradients, size)
    steppers = [
        build_optimizer(optimizer, shard.parameters.values(), 0.01, 0.9, 0.1) if shard.parameters else None
        for shard in shards
    ]
    plain = build_optimizer(optimizer, whole.parameters.values(), 0.01, 0.9, 0.1)
    untouched = stage.layers[0].last.detach().clone()
    for step in range(5):
        gradients.flat.copy_(torch.randn(len(gradients.flat), generator=torch.Generator().manual_seed(step)))
        whole.flat.copy_(gradients.flat)
        touched = set(gradients.parameters) - {"layers.0.last", *(["layers.1.bias"] if step == 2 else [])}
        whole.attach(touched)
        whole.scale(0.5)
        plain.step()
        for shard, stepper in zip(shards, steppers):
            shard.attach(touched)
            shard.scale(0.5)
            if stepper is not None:
                stepper.step()
    for name, parameter in other.named_parameters().items():
        assert torch.equal(parameter, stage.named_parameters()[name]), name
    assert torch.equal(stage.layers[0].last, untouched)
    if optimizer in ("sgd", "momentum"):  # the others count steps besides, in each part
        assert sum(map(state_bytes, steppers)) == state_bytes(plain)


def test_norm_and_faults_are_those_of_the_owned_part():
    stage, gradients = odd()
    gradients.flat.zero_()
    gradients.views["layers.0.matrix"].fill_(2.0)
    shards = shards_of(gradients, 4)
    squares = [shard.squared_norm(shard.parameters) for shard in shards]
    assert sum(squares) == 4.0 * 13 * 7 and sum(square > 0 for square in squares) > 1
    gradients.views["layers.0.matrix"][0, 0] = torch.inf
    found = [[shard.not_finite(bucket) for bucket in shard.buckets] for shard in shards]
    assert sum(found, []).count("layers.0.matrix") == 1 and set(sum(found, [])) == {None, "layers.0.matrix"}
