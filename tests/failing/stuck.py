"""A task of which one rank stops to get on, in its third step: asleep in a layer, or stopped as a process."""

import os
import signal
import time
from dataclasses import dataclass

from torch import nn

from tests.train.toys import Masked


class Sticks(nn.Module):
    def __init__(self, rank: int, how: str):
        super().__init__()
        self.rank, self.how, self.calls = rank, how, 0

    def forward(self, x):
        from mpi4py import MPI

        self.calls += self.training
        if self.calls == 3 and MPI.COMM_WORLD.rank == self.rank:
            if self.how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                time.sleep(1)
        return x


@dataclass
class Stuck(Masked):
    rank: int = 1
    how: str = "asleep"

    def layers(self):
        return [*super().layers(), lambda: Sticks(self.rank, self.how)]
