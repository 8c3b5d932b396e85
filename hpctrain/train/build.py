"""The parts of a rank, put together from a configuration and a task."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hpctrain.comm.allreduce import check_algorithm
from hpctrain.comm.device_buffer import allocator
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.roles import Roles
from hpctrain.config import Config
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.precision import Precision
from hpctrain.model.random_state import CPU
from hpctrain.model.split import SplitBackward
from hpctrain.model.stage import Stage, build_stage
from hpctrain.model.ties import tie_sets
from hpctrain.plan.compression import is_summed_in_place
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.tasks.load import open_dataset
from hpctrain.tasks.protocol import figures_of, metric_of
from hpctrain.train.assignment import Assignment, assign_layers
from hpctrain.train.batches import Batches, GlobalSampler
from hpctrain.train.checked import checked_factories, checked_layer
from hpctrain.train.errors import AgreedError, agreed
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.executor import Executor
from hpctrain.train.layout import place_of, settled
from hpctrain.train.links import Links
from hpctrain.train.loader import Reader, Request, read
from hpctrain.train.lookups import KeptBatches
from hpctrain.train.optimizer import build_optimizer
from hpctrain.train.passes import Passes
from hpctrain.train.start import start_equal
from hpctrain.train.straggle import Straggle
from hpctrain.train.tables import Tables, check, check_found, tables_of, with_lookups
from hpctrain.train.tied import TiedWeights
from hpctrain.train.which_update import build_shard, build_update
from hpctrain.train.wrap import check_compressible

EXAMPLE_ROWS = 2  # that rank 0 sends through the model to count what its layers cost


def build_model(config: Config, task) -> Stage:
    """The whole model of `task`, tied where the task says so."""
    factories, is_module = layers_of(task)
    stage = build_stage(factories, config.seed, Precision(config.precision), is_module=is_module, check=checked_layer)
    try:
        stage.tie(tie_sets(ties_of(task), stage.shapes()))
    except ValueError as error:
        raise AgreedError(str(error)) from None
    return stage


def layers_of(task) -> tuple[Sequence[Callable[[], nn.Module]], bool]:
    """Factories of the layers, and whether it is one module that cannot be cut."""
    if hasattr(task, "layers"):
        return checked_factories(task.layers(), "layers()"), False
    return [task.module], True


def ties_of(task) -> list[tuple[str, str]]:
    return list(task.ties()) if hasattr(task, "ties") else []


def build_executor(
    config: Config,
    task,
    mesh: Mesh,
    batches=None,
    optimizer: Callable | None = None,
    example: Any = None,
    roles: Roles | None = None,
    device: torch.device = CPU,
) -> Executor:
    """This rank's layers on `device`, their gradients and optimizer, equal on all replicas. Collective.

    `batches` take the place of the task's data, `optimizer(parameters)` that of the configuration's, `example` (a few
    rows of inputs) that of the first rows of the task. `roles`: where there are servers, whose workers are the ranks of
    `mesh`. AgreedError where the model and the layout do not fit.
    """
    config = settled(config, mesh.size + (roles.num_servers if roles else 0))
    with agreed(mesh.everybody):
        factories, is_module = layers_of(task)
        if is_module and config.stages > 1:
            raise AgreedError(f"--stages {config.stages}: the task has a module(); only a list of layers() can be cut")
    if batches is None:
        batches = build_batches(config, task, mesh)
        example = partial(_first_inputs, config, task)
    assignment = assign_layers(config, factories, mesh, example)
    with agreed(mesh.everybody):
        check(config, described := tables_of(task))
    factories, modules = with_lookups(factories, described, is_module) if described else (factories, {})
    stage, names, tied = build_part(config, task, factories, assignment, mesh, device)
    check_found(described, modules)
    names += list(modules)
    batches = KeptBatches(batches) if described else batches
    gradients = build_gradients(config, stage, mesh, roles, names)
    shard = build_shard(config, mesh, gradients)
    make = build_update(config, mesh, gradients, roles, Tables(described, modules, batches), shard, device)
    trained = list((shard or gradients).parameters.values())
    optimizer = (optimizer or partial(_optimizer, config))(trained) if trained else None
    update = make(stage, gradients, optimizer, mesh, names, tied, **_how_to_update(config))
    splits = SCHEDULES[config.schedule].splits_backward
    split = SplitBackward(stage.layers, stage.named_parameters()) if splits else None
    passes = Passes(stage, batches, task.loss, Links(mesh, len(stage.parts), device), update, config.recompute, split)
    executor = Executor(passes, update, config.schedule, place_of(config, mesh.stage))
    executor.straggle = Straggle(config.straggler, config.seed, mesh.rank) if config.straggler else None
    return executor


def _optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return build_optimizer(config.optimizer, parameters, config.lr, config.momentum, config.weight_decay)


def _how_to_update(config: Config) -> dict:
    return {name: getattr(config, name) for name in ("on_nan", "clip_norm", "allreduce", "compress")}


def build_gradients(config: Config, stage: Stage, mesh: Mesh, roles: Roles | None, names: list[str]) -> FlatGradients:
    """In memory that the replicas share, where they sum them up there. `names`: of the whole model's. Collective."""
    if not names:
        raise AgreedError(f"--task {config.task}: the model has no parameter that requires a gradient")
    with agreed(mesh.everybody):
        if config.compress != "none":
            check_compressible(stage.named_parameters(), f"--compress {config.compress}", config.compress)
        try:
            check_algorithm(config.allreduce, mesh.data.ring)
        except ValueError:
            raise AgreedError(
                "--allreduce windows: the replicas share no memory, or unequally many are on a node, or /dev/shm has "
                "no room; auto takes messages there"
            ) from None
    summed_here = stage.device.type == "cpu" and (roles is None or config.dense_via == "ring")
    in_windows = not config.shard_optimizer and is_summed_in_place(config.allreduce, config.compress)
    memory = mesh.data.allocate if summed_here and in_windows else allocator(stage.device)
    return FlatGradients(stage.named_parameters(), memory, config.bucket_bytes)


def build_part(
    config: Config, task, factories: Sequence, assignment: Assignment, mesh: Mesh, device: torch.device = CPU
) -> tuple[Stage, list[str], TiedWeights]:
    """This rank's layers; the names of all trained parameters of the model, in model order; what stages share.

    Collective.
    """
    parts = assignment.of_stage(mesh.stage, config.stages)
    with agreed(mesh.everybody):
        stage = build_stage(
            factories,
            config.seed,
            Precision(config.precision),
            is_module=not hasattr(task, "layers"),
            check=checked_layer,
            parts=parts,
            device=device,
        )
    described = describe_parameters(stage, mesh)
    with agreed(mesh.everybody):
        sets = tie_sets([*ties_of(task), *assignment.pairs], {name: each.shape for name, each in described.items()})
        check_ties(sets, described, config)
    stage.tie(sets)
    with agreed(mesh.everybody):
        start_equal(stage, mesh.data)
    again = {name for names in sets for name in names[1:]}
    trained = [name for name, each in described.items() if each.is_trained and name not in again]
    return stage, trained, TiedWeights(sets, described, stage.named_parameters(), mesh)


class Described(NamedTuple):
    """What all ranks know of a parameter that one of them holds."""

    shape: list[int]
    is_trained: bool
    stage: int


def check_ties(sets: list[list[str]], described: Mapping[str, Described], config: Config) -> None:
    """AgreedError for parameters that cannot be one."""
    for names in sets:
        if len({described[name].is_trained for name in names}) > 1:
            raise AgreedError(f"--task: ties() names {' and '.join(names)}, of which one is frozen; freeze all or none")
        if len({described[name].stage for name in names}) > 1 and not SCHEDULES[config.schedule].flushes:
            raise AgreedError(
                f"--schedule {config.schedule}: {' and '.join(names[:2])} are one parameter on two stages;"
                " take a schedule with a flush, such as 1f1b"
            )


def describe_parameters(stage: Stage, mesh: Mesh) -> dict[str, Described]:
    """All parameters of the model, by name in model order. Collective."""
    own = {}
    for prefix, layer in stage.named_layers().items():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            each = Described(list(parameter.shape), parameter.requires_grad, mesh.stage)
            own[Stage.join(prefix, name)] = each
    if mesh.grid.num_stages == 1:
        return own
    told = mesh.world.all_gather_json(own if mesh.replica == 0 else {})
    everything = {name: Described(*each) for part in told for name, each in part.items()}
    order = sorted(everything, key=lambda name: int(name.split(".")[1]))  # stable: as its layer has them
    return {name: everything[name] for name in order}


def build_batches(config: Config, task, mesh: Mesh) -> Batches:
    """This replica's rows of each step."""
    sampler = GlobalSampler(len(task.dataset("train")), config.global_batch_size, config.seed)
    return Batches(
        _reader(config, task, "train", Precision(config.precision)),
        sampler,
        mesh.replica,
        mesh.data.size,
        config.num_microbatches,
        config.loader_workers,
    )


def build_evaluation(config: Config, task, mesh: Mesh, dataset=None, borders: Sequence[int] = ()) -> Evaluation:
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
        figures_of(task),
        borders,
    )


def _first_inputs(config: Config, task) -> Any:
    rows = tuple(range(min(EXAMPLE_ROWS, len(task.dataset("train")))))
    inputs, _ = next(read(_reader(config, task, "train", Precision(config.precision)), [Request(rows)]))
    return inputs


def _reader(config: Config, task, split: str, precision: Precision) -> Reader:
    """Reads from `task`; processes that read ahead build a task of their own."""
    recipe = partial(open_dataset, config.task, config.task_option, config.data, split)
    return Reader(recipe, precision.dtype, config.seed, task.dataset(split))
