"""The parts of a rank, put together from a configuration and a task."""

from functools import partial

from hpctrain.comm.buffer import allocate
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.precision import Precision
from hpctrain.model.stage import Stage, build_stage
from hpctrain.tasks.load import open_dataset
from hpctrain.tasks.protocol import metric_of
from hpctrain.train.batches import Batches, GlobalSampler
from hpctrain.train.checked import checked_factories, checked_layer
from hpctrain.train.errors import AgreedError
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.executor import Executor
from hpctrain.train.loader import Reader
from hpctrain.train.optimizer import build_optimizer
from hpctrain.train.start import start_equal


def build_model(config: Config, task) -> Stage:
    """The whole model of `task`, tied where the task says so."""
    is_module = not hasattr(task, "layers")
    factories = [task.module] if is_module else checked_factories(task.layers(), "layers()")
    stage = build_stage(factories, config.seed, Precision(config.precision), is_module=is_module, check=checked_layer)
    try:
        stage.tie(task.ties() if hasattr(task, "ties") else ())
    except ValueError as error:
        raise AgreedError(str(error)) from None
    return stage


def build_executor(config: Config, task, mesh: Mesh) -> Executor:
    """All layers, their gradients and optimizer on this rank, equal on all replicas. Collective."""
    stage = build_model(config, task)
    start_equal(stage, mesh.data)
    gradients = FlatGradients(stage.named_parameters(), allocate, config.bucket_bytes)
    if not gradients.parameters:
        raise AgreedError(f"--task {config.task}: the model has no parameter that requires a gradient")
    optimizer = build_optimizer(
        config.optimizer, gradients.parameters.values(), config.lr, config.momentum, config.weight_decay
    )
    num_rows = len(task.dataset("train"))
    sampler = GlobalSampler(num_rows, config.global_batch_size, config.seed)
    batches = Batches(
        _reader(config, task, "train", stage.precision),
        sampler,
        mesh.replica,
        mesh.data.size,
        config.num_microbatches,
        config.loader_workers,
    )
    return Executor(stage, gradients, optimizer, batches, task.loss, mesh, config.on_nan, config.clip_norm)


def build_evaluation(config: Config, task, mesh: Mesh, dataset=None) -> Evaluation:
    """Over the held-out rows of `task`, none at all where it holds out none; or over the rows of `dataset`."""
    if dataset is None:
        dataset = task.dataset("eval")
        reader = _reader(config, task, "eval", Precision(config.precision))
    else:
        reader = Reader(lambda: dataset, Precision(config.precision).dtype, config.seed)
    return Evaluation(
        reader,
        0 if dataset is None else len(dataset),
        metric_of(task),
        mesh,
        config.global_batch_size,
        config.eval_batches,
        config.loader_workers,
    )


def _reader(config: Config, task, split: str, precision: Precision) -> Reader:
    """Reads from `task`; processes that read ahead build a task of their own."""
    recipe = partial(open_dataset, config.task, config.task_option, config.data, split)
    return Reader(recipe, precision.dtype, config.seed, task.dataset(split))
