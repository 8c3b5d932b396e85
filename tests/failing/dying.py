"""A task of which ranks are killed as they compute: `deaths` says which, as launched, and in which of their forwards.

`1:5+0:9`: rank 1 in its fifth forward, rank 0 in its ninth. With micro-batches a forward is one of them.
"""

import os
import signal
from dataclasses import dataclass

import torch
from torch import nn

from tests.train import recommender
from tests.train.toys import Masked

num_forwards = 0  # of this process, whatever was built anew meanwhile


class Dies(nn.Module):
    def __init__(self, deaths: str, in_backward: bool = False):
        super().__init__()
        self.deaths = dict(map(int, each.split(":")) for each in deaths.split("+") if each)
        self.in_backward = in_backward

    def forward(self, x):
        global num_forwards
        if self.training and torch.is_grad_enabled():
            num_forwards += 1
            if self.in_backward and x.requires_grad:
                x.register_hook(lambda gradient: self.die())
            elif not self.in_backward:
                self.die()
        return x

    def die(self):
        from mpi4py import MPI

        if self.deaths.get(MPI.COMM_WORLD.rank) == num_forwards:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Dying(Masked):
    deaths: str = ""
    in_backward: bool = False
    mixes: bool = False  # its rows, by BatchNorm

    def layers(self):
        first, *rest = super().layers()
        mixing = [lambda: Mixing(8)] if self.mixes else []
        return [first, *mixing, lambda: Dies(self.deaths, self.in_backward), *rest]


class Mixing(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@dataclass
class DyingRecommender(recommender.Recommender):
    deaths: str = ""

    def layers(self):
        first, *rest = super().layers()
        return [first, lambda: Dies(self.deaths), *rest]
