"""Memory for messages: what is held is nobody else's, what is not is used again."""

import gc

import numpy as np
import pytest
import torch

from hpctrain.train.memory import SMALLEST, MessageMemory


@pytest.mark.parametrize(
    "shape, dtype", [((3, 5), torch.float32), ((70, 300), torch.float64), ((2**21 + 7,), torch.bfloat16)]
)
def test_shapes_and_alignment(shape, dtype):
    tensor = MessageMemory().empty(*shape, dtype=dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor[5:],
        lambda tensor: tensor.view(torch.uint8).numpy(),
        lambda tensor: tensor.view(torch.uint8).numpy()[3:90].view(np.int8),
        lambda tensor: tensor.requires_grad_().detach()[1:],
    ],
    ids=["tensor", "numpy", "numpy slice", "detached"],
)
def test_a_block_is_free_when_nobody_holds_a_view_of_it(view):
    memory = MessageMemory()
    first = memory.empty(SMALLEST, dtype=torch.float32)
    where = first.data_ptr()
    held = view(first)
    del first
    gc.collect()
    other = memory.empty(SMALLEST, dtype=torch.float32)
    assert other.data_ptr() != where
    del held
    gc.collect()
    assert memory.empty(SMALLEST - 1, dtype=torch.float32).data_ptr() == where


def test_blocks_do_not_overlap():
    memory = MessageMemory()
    tensors = [memory.empty(length, dtype=torch.uint8) for length in (SMALLEST, 100_000, 3 << 20, 20 << 20, 100_001)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


def test_it_may_end_before_its_tensors():
    memory = MessageMemory()
    tensor = memory.empty(SMALLEST, dtype=torch.uint8).fill_(7)
    del memory
    gc.collect()
    assert (tensor == 7).all()
