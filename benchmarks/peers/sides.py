"""The same layers on the same two stages, trained in three ways: by hpctrain, by torch, and by one rank alone."""

import argparse
import os
from collections import OrderedDict
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import Mesh, Pipeline

LEARNING_RATE = 0.1


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Ours:
    """hpctrain's pipeline over `factories`."""

    def __init__(self, factories: list, flags: argparse.Namespace, mesh: Mesh):
        first = len(factories) // 2
        split = f"{first},{len(factories) - first}"
        how = {"schedule": "1f1b", "num_microbatches": flags.microbatches, "stage_split": split}
        self.pipeline = Pipeline(factories, mean_loss, mesh, sgd, **how)
        self.layers = self.pipeline.executor.stage.parts[0]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        return self.pipeline.step(inputs, targets)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and gradients of this rank, by name."""
        named = self.pipeline.executor.stage.named_parameters()
        return self.pipeline.state_dict(), {name.removeprefix("layers."): each.grad for name, each in named.items()}


class Torchs:
    """torch's pipeline of the same layers on the same stages, from the same weights."""

    def __init__(self, factories: list, flags: argparse.Namespace, mesh: Mesh, ours: Ours):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes seconds

        self.module = nn.Sequential(OrderedDict((str(index), factories[index]()) for index in ours.layers))
        self.module.load_state_dict(ours.tensors()[0])
        self.optimizer = sgd(self.module.parameters())
        stage = PipelineStage(self.module, mesh.stage, mesh.size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, flags.microbatches, mean_loss)
        self.is_first = mesh.stage == 0

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.is_first:
            self.schedule.step(inputs, return_outputs=False)
        else:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
        self.optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.module.state_dict(), {name: each.grad for name, each in self.module.named_parameters()}


class Alone:
    """The whole model in a plain loop over the same micro-batches."""

    def __init__(self, factories: list, flags: argparse.Namespace):
        self.module = nn.Sequential(*[factory() for factory in factories])
        self.optimizer, self.num_microbatches = sgd(self.module.parameters()), flags.microbatches

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        for pair in zip(inputs.chunk(self.num_microbatches), targets.chunk(self.num_microbatches)):
            (mean_loss(self.module(pair[0]), pair[1]) / self.num_microbatches).backward()
        self.optimizer.step()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def start_torch(mesh: Mesh) -> None:
    """torch.distributed over gloo, between the ranks of `mesh`. Collective."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    make = partial(dist.TCPStore, "127.0.0.1", world_size=mesh.size, wait_for_workers=False)
    store = make(0, is_master=True) if mesh.rank == 0 else None
    port = mesh.world.broadcast_json(store and store.port)
    dist.init_process_group("gloo", store=store or make(port), rank=mesh.rank, world_size=mesh.size)
