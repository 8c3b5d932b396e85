"""One process with one micro-batch equals a plain torch loop, bit for bit."""

import pytest
import torch

from hpctrain.config import OPTIMIZERS, Config
from hpctrain.train.batches import GlobalSampler
from hpctrain.train.build import build_model
from hpctrain.train.loader import Reader, Request
from tests.oracles.plain_loop import make_optimizer, plain_loop
from tests.train.test_equivalence import LEARNING_RATES, TASKS
from tests.train.toys import run


@pytest.mark.parametrize("precision", ("float32", "float64"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_one_process_equals_a_plain_torch_loop(task, optimizer, precision):
    settings = {"optimizer": optimizer, "lr": LEARNING_RATES[optimizer], "global_batch_size": 8, "weight_decay": 0.01}
    losses, weights, _ = run(TASKS[task], precision=precision, **settings)

    dataset = TASKS[task].dataset("train")
    stage = build_model(Config(precision=precision), TASKS[task])
    sampler, reader = GlobalSampler(len(dataset), 8, 0), Reader(lambda: dataset, stage.precision.dtype)
    batches = [reader[Request(tuple(sampler.rows(step)))] for step in range(20)]
    update = make_optimizer(optimizer, LEARNING_RATES[optimizer], Config().momentum, 0.01)
    assert losses == plain_loop(stage.layers, TASKS[task].loss, batches, update)
    for name, weight in stage.named_parameters().items():
        assert torch.equal(weights[name], weight), name
