"""Layers whose computations take a known time and no core: they sleep."""

import os
import time

import torch
from torch import nn

from hpctrain.model.split import Deferred, SplitBackward

AWAKE = 2e-4  # seconds at the end of a sleep, to end it on time
WIDTH = 4  # of a layer, which computes next to nothing


class Asleep(torch.autograd.Function):
    """Its inputs, after so many seconds; their gradient likewise."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        sleep_until(time.perf_counter() + forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        sleep_until(time.perf_counter() + ctx.backward_seconds)
        return gradient, None, None


class TimedLayer(nn.Module):
    """A small linear map that takes so many seconds forward and backward."""

    def __init__(self, forward: float, backward: float):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seconds = forward, backward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Asleep.apply(self.linear(inputs), *self.seconds)


class TimedSplit(SplitBackward):
    """Splits the backward of timed layers for real, and lets each W take so many seconds."""

    seconds = 0.0

    def take(self) -> "TimedWeights":
        return TimedWeights(super().take(), self.seconds)


class TimedWeights:
    """A Deferred that takes its time."""

    def __init__(self, deferred: Deferred, seconds: float):
        self._deferred, self._seconds = deferred, seconds
        self.tensors = deferred.tensors

    def run(self, accumulate) -> None:
        end = time.perf_counter() + self._seconds
        self._deferred.run(accumulate)
        sleep_until(end)


def sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter() - AWAKE))
    while time.perf_counter() < end:
        os.sched_yield()
