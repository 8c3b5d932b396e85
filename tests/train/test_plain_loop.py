"""One process with one micro-batch equals a plain torch loop, bit for bit."""

import pytest
import torch

from hpctrain.config import OPTIMIZERS, Config
from hpctrain.model.stage import build_stage
from hpctrain.train.batches import Sampler, read_rows
from tests.oracles.plain_loop import make_optimizer, plain_loop
from tests.train.test_equivalence import LEARNING_RATES, TASKS
from tests.train.toys import run

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_one_process_equals_a_plain_torch_loop(task, optimizer, precision):
    settings = {"optimizer": optimizer, "lr": LEARNING_RATES[optimizer], "global_batch_size": 8, "weight_decay": 0.01}
    losses, weights, _ = run(TASKS[task], precision=precision, **settings)

    dataset, dtype = TASKS[task].dataset("train"), DTYPES[precision]
    stage = build_stage(TASKS[task].layers(), 0, dtype)
    sampler = Sampler(len(dataset), 8, 0)
    batches = [read_rows(dataset, sampler.rows(step), dtype) for step in range(20)]
    update = make_optimizer(optimizer, LEARNING_RATES[optimizer], Config().momentum, 0.01)
    assert losses == plain_loop(stage.layers, TASKS[task].loss, batches, update)
    for name, weight in stage.named_parameters().items():
        assert torch.equal(weights[name], weight), name
