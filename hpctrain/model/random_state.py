"""The generators of random numbers that a program has, left as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

CPU = torch.device("cpu")


def seed_generators(seed: int, device: torch.device) -> None:
    """Those of torch that a layer on `device` may draw from."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)


def generators_kept(device: torch.device):
    """A context: those of torch that `seed_generators` sets are afterwards where they were before."""
    devices = [] if device.type == "cpu" else [device.index or 0]
    return torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The generators of torch (CPU), NumPy and Python are afterwards where they were before."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
