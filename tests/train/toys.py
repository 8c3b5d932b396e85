"""Small tasks with everything that can go wrong in them: masks, unused parameters, frozen layers, dropout, NaN."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.random_state import CPU
from hpctrain.train.build import build_evaluation, build_executor
from hpctrain.train.layout import grid_of, settled
from hpctrain.train.tables import whole_table
from hpctrain.train.trainer import Trainer

NUM_ROWS, WIDTH, CLASSES = 37, 6, 4


@dataclass
class Masked:
    """Classification of sequences of 3 items of which 0 to 3 count: rows weigh unequally, some weigh nothing."""

    dropout: float = 0.0
    name = "masked"

    def layers(self):
        return [
            lambda: nn.Linear(WIDTH, 8, bias=False),
            lambda: nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Dropout(self.dropout)),
            lambda: nn.Linear(8, CLASSES),
        ]

    def loss(self, outputs, targets):
        counted = int((targets >= 0).sum())
        return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"), counted

    def metric(self, outputs, targets):
        total, items = self.loss(outputs, targets)
        return {"loss": (float(total), items), "rows": (float(len(targets)), 1)}

    def dataset(self, split):
        generator = torch.Generator().manual_seed(7 if split == "train" else 8)
        inputs = torch.randn(NUM_ROWS, 3, WIDTH, generator=generator, dtype=torch.float64)
        targets = torch.randint(-1, CLASSES, (NUM_ROWS, 3), generator=generator)
        targets[::5] = -1
        return list(zip(inputs, targets))


@dataclass
class Deep(Masked):
    """Sixteen small layers, so that eight stages get two chunks each."""

    def layers(self):
        first, *rest = super().layers()
        middle = [lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), lambda: nn.Linear(8, 8, bias=False)]
        return [first, *(7 * middle)[:13], *rest]


class Branching(nn.Module):
    """`sometimes` is used by rows whose first value is positive, `never` by none."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        chosen = x[:, 0, 0] > 1.0
        x = self.always(x)
        if chosen.any():
            x = x + chosen[:, None, None] * self.sometimes(x)
        return x


@dataclass
class Unused(Masked):
    """A model of which parts are used on some ranks only, and parts never."""

    def layers(self):
        return [Branching] + super().layers()


class Frozen(nn.Module):
    """A frozen random projection, a buffer, and a trained scale."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.projection.requires_grad_(False)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.projection(x) * self.scale + self.shift.to(x.dtype)


@dataclass
class WithFrozen(Masked):
    def layers(self):
        return [Frozen] + super().layers()


class Projection(nn.Module):
    """Scores against a table of its own, which a task may tie to another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH) * 0.3)

    def forward(self, x):
        return x @ self.weight.T


@dataclass
class Tied(Masked):
    """The first layer's matrix is used again by the third; without ties() they would be two."""

    def layers(self):
        first, *rest = super().layers()
        return [first, lambda: nn.Linear(8, WIDTH), Projection, *rest]

    def ties(self):
        return [("layers.0.weight", "layers.2.weight")]


class WholeModule(nn.Module):
    """Takes its inputs by name, as models of transformers do, and gives a dict."""

    def __init__(self, dropout):
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, rows, weight):
        hidden = self.dropout(torch.nn.functional.gelu(self.norm(self.enter(rows))))
        return {"scores": self.leave(hidden) * weight[:, None, None]}


@dataclass
class AsModule:
    """The same rows as dicts, for a model that is one module."""

    dropout: float = 0.0

    def module(self):
        return WholeModule(self.dropout)

    def loss(self, outputs, targets):
        return Masked().loss(outputs["scores"], targets["labels"])

    def dataset(self, split):
        rows = Masked().dataset(split)
        return [({"rows": x, "weight": torch.tensor(1.0 + i % 3)}, {"labels": y}) for i, (x, y) in enumerate(rows)]


class MixRows(nn.Module):
    """BatchNorm over rows and their items: at least three values a channel, also of one row."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@dataclass
class Mixing(Masked):
    """The rows of a micro-batch see each other."""

    def layers(self):
        return [MixRows, *super().layers()]


def all_weights(executor, mesh) -> dict:
    """Of the whole model, by name, on every rank; of copies the first, of tables all rows."""
    weights = {name: p.detach().cpu().clone() for name, p in executor.stage.named_parameters().items()}
    if executor.update.lookups is not None:
        modules = executor.update.lookups.modules
        weights |= {name: whole_table(module, executor.stage.precision.dtype) for name, module in modules.items()}
    if mesh.grid.num_stages == 1:
        return weights
    told = mesh.pipe.all_gather_json({name: [list(p.shape), p.flatten().tolist()] for name, p in weights.items()})
    canonical = executor.update.tied.canonical
    return {
        name: torch.tensor(values, dtype=executor.stage.precision.dtype).view(shape)
        for part in told
        for name, (shape, values) in part.items()
        if canonical(name) == name
    }


def run(task, comm=None, log=None, device=CPU, **settings):
    """Trains `task` on all ranks of `comm`; returns losses by step, weights by name, and the executor.

    With stages the weights are those of all of them. `log` gets the actions of this rank.
    """
    settings = {"steps": 20, "precision": "float64", "lr": 0.05, "bucket_bytes": 200, **settings}
    config = settled(Config(**settings), comm.size if comm is not None else 1)
    lines = []
    mesh = Mesh(comm, grid_of(config, comm.size) if comm is not None else None)
    executor = build_executor(config, task, mesh, device=device)
    if log is not None:
        executor.watchers.append(lambda action, *times: log.append(action))
    evaluation = build_evaluation(config, task, mesh) if config.eval_every else None
    trainer = Trainer(config, executor, mesh, lines.append, evaluation)
    trainer.check()
    trainer.train()
    weights = all_weights(executor, mesh)
    mesh.close()
    return [line["loss"] for line in lines if "loss" in line], weights, executor
