"""A user's task in a file: rows that are augmented at random, and a row at which something goes wrong."""

import multiprocessing
import os
import random
import signal
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss


class Rows:
    """`num_rows` rows of 3 numbers and their sum, with noise from each generator there is."""

    def __init__(self, num_rows: int, fault: str, row: int):
        self.num_rows, self.fault, self.row = num_rows, fault, row

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        if index == self.row and self.fault == "missing":
            open("/no/such/row.png")  # noqa: SIM115 - fails
        if index == self.row and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.row and self.fault == "terminated":  # the process that this one reads for
            os.kill(multiprocessing.parent_process().pid, signal.SIGTERM)
        if index == self.row and self.fault == "raise":
            raise RuntimeError("row 5 is a bug of the task")
        noise = torch.rand(3) + random.random() + np.random.rand()
        inputs = torch.tensor([index % 7, index % 5, index % 3], dtype=torch.float32)
        return inputs / 7 + 0.1 * noise, inputs.sum() / 10


@dataclass
class Noisy:
    rows: int = 40
    fault: str = "none"
    row: int = 5

    def layers(self):
        return [lambda: nn.Linear(3, 8), nn.Tanh, lambda: nn.Linear(8, 1)]

    def loss(self, outputs, targets):
        return mse_loss(outputs[:, 0], targets, reduction="sum"), len(targets)

    def dataset(self, split):
        return Rows(self.rows if split == "train" else 9, self.fault if split == "train" else "none", self.row)
