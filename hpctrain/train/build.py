"""The parts of a rank, put together from a configuration and a task."""

import torch

from hpctrain.comm.buffer import allocate
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.stage import build_stage
from hpctrain.train.batches import Batches, Sampler
from hpctrain.train.executor import Executor
from hpctrain.train.optimizer import build_optimizer
from hpctrain.train.start import start_equal

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def build_executor(config: Config, task, mesh: Mesh) -> Executor:
    """All layers, their gradients and optimizer on this rank, equal on all replicas. Collective."""
    dtype = DTYPES[config.precision]
    stage = build_stage(task.layers(), config.seed, dtype)
    start_equal(stage, mesh.data)
    parameters = stage.named_parameters()
    gradients = FlatGradients(parameters, allocate, config.bucket_bytes)
    optimizer = build_optimizer(
        config.optimizer, gradients.parameters.values(), config.lr, config.momentum, config.weight_decay
    )
    dataset = task.dataset("train")
    sampler = Sampler(len(dataset), config.global_batch_size, config.seed)
    batches = Batches(dataset, sampler, mesh.replica, mesh.data.size, config.num_microbatches, dtype)
    return Executor(stage, gradients, optimizer, batches, task.loss, mesh, config.on_nan)
