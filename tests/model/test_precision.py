"""In which dtype, and for which kind of device, a forward is computed."""

import warnings
from contextlib import nullcontext

import torch

from hpctrain.model.precision import Precision
from hpctrain.model.stage import build_stage


def test_mixed_precision_is_that_of_the_device():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this torch may have no CUDA
        context = Precision("bf16-mixed").forward("cuda")
    assert (context.device, context.fast_dtype) == ("cuda", torch.bfloat16)
    assert isinstance(Precision().forward("cuda"), nullcontext)


def test_a_stage_multiplies_in_bfloat16_and_gives_the_loss_float32():
    stage = build_stage([lambda: torch.nn.Linear(3, 2)], 0, Precision("bf16-mixed"))
    seen = []
    stage.layers[0].register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    assert stage.forward(torch.ones(1, 3), 0, 0).dtype == torch.float32
    assert seen == [torch.bfloat16] and stage.layers[0].weight.dtype == torch.float32
