"""What one layout saves another takes over: the same weights and states, and the rest of the run as if undisturbed."""

import itertools

import pytest
import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.random_state import CPU
from hpctrain.train import checkpoint_files as files
from hpctrain.train.build import build_executor
from hpctrain.train.checkpoint_files import CheckpointError
from hpctrain.train.checkpoint_pieces import Tensors, described, index, stored
from hpctrain.train.checkpoint_state import State
from hpctrain.train.layout import grid_of, settled
from hpctrain.train.trainer import Trainer
from tests.train.recommender import Recommender
from tests.train.sharing import by_rank_0
from tests.train.test_equivalence import MORE, assert_equal_to_reference, part_of, reference, settings, task_of
from tests.train.toys import all_weights

MORE |= {"recommender": Recommender()}
LAYOUTS = {  # stages, replicas, and more
    "1x1": (1, 1, {}),
    "1x3": (1, 3, {}),
    "2x1": (2, 1, {"num_microbatches": 2}),
    "2x2": (2, 2, {"num_microbatches": 2, "schedule": "zb-h1"}),
    "4x1": (4, 1, {"num_microbatches": 2}),
    "1x4 shared": (1, 4, {"shard_optimizer": True}),
    "2x2 shared": (2, 2, {"num_microbatches": 2, "shard_optimizer": True}),
}
SAVED, STEPS = 5, 12


def needs(name: str) -> int:
    return LAYOUTS[name][0] * LAYOUTS[name][1]


def prepared(task, comm, layout: str, device=CPU, **how):
    stages, _, more = LAYOUTS[layout]
    how = {"steps": STEPS, "precision": "float64", "bucket_bytes": 200, **more, **how}
    config = settled(Config(stages=stages, **how), comm.size)
    mesh = Mesh(comm, grid_of(config, comm.size))
    executor = build_executor(config, task_of(task), mesh, device=device)
    lines: list = []
    return mesh, executor, Trainer(config, executor, mesh, lines.append), lines


def train_until(trainer, step: int) -> None:
    while trainer.state.step < step:
        trainer._run_until(trainer._next_stop())


def save(mesh, executor, folder):
    """Writes the pieces of all ranks; where each lies, on every rank. Collective."""
    pieces = list(State(executor).pieces())
    own = files.write_tensors(folder, f"rank-{mesh.rank:04d}.safetensors", stored(pieces))
    told = mesh.world.all_gather_json([[own.name, own.nbytes, own.sha256], described(pieces)])
    return [files.File(*each) for each, _ in told], [each for _, each in told]


def states(executor) -> dict:
    """What the optimizer keeps, by name of the parameter and slot, of whole parameters."""
    found = {}
    for name, parameter in executor.update.gradients.parameters.items():
        for slot, value in executor.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{slot}"] = value.clone()
    return found


OPTIMIZERS = itertools.cycle(("adam", "momentum", "adagrad", "sgd", "adamw"))
NEXT = list(zip(LAYOUTS, (*list(LAYOUTS)[1:], "1x1")))  # each once before another one, and once after
PAIRS = [
    *((a, b, optimizer, "deep") for (a, b), optimizer in zip(NEXT + [(b, a) for a, b in NEXT], OPTIMIZERS)),
    ("1x3", "2x2", "adam", "tied"),
    ("2x2", "1x4 shared", "adam", "tied"),
    ("2x2 shared", "1x3", "adamw", "unused"),
    ("1x3", "1x1", "adam", "recommender"),
    ("1x1", "1x4 shared", "adagrad", "recommender"),
    ("1x4 shared", "2x1", "momentum", "frozen"),
]


@pytest.mark.mpi
@pytest.mark.parametrize("before, after, optimizer, task", PAIRS)
def test_a_run_goes_on_in_another_layout_as_if_undisturbed(comm, shared_tmp_path, before, after, optimizer, task):
    if max(needs(before), needs(after)) > comm.size:
        pytest.skip(f"needs {max(needs(before), needs(after))} ranks")
    how = settings(optimizer, 13)
    told = None
    if part := part_of(comm, needs(before)):
        mesh, executor, trainer, _ = prepared(task, part, before, **how)
        train_until(trainer, SAVED)
        told = save(mesh, executor, shared_tmp_path)
        mesh.close()
        part.Free()
    told = by_rank_0(comm, lambda: told)
    if part := part_of(comm, needs(after)):
        mesh, executor, trainer, lines = prepared(task, part, after, **how)
        State(executor).prepare(Tensors(shared_tmp_path, index(shared_tmp_path, *told)))()
        trainer.state.step = SAVED
        trainer.train()
        losses, weights = [line["loss"] for line in lines], all_weights(executor, mesh)
        mesh.close()
        part.Free()
        check_rest(losses, weights, task, optimizer)


def check_rest(losses, weights, task, optimizer):
    expected, _ = reference(task, optimizer, 13, steps=STEPS)
    assert_equal_to_reference(expected[:SAVED] + losses, weights, task, optimizer, 13, steps=STEPS)


@pytest.mark.mpi
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_the_same_layout_it_gives_the_same_bits(comm, shared_tmp_path, layout):
    if needs(layout) > comm.size:
        pytest.skip(f"needs {needs(layout)} ranks")
    if (part := part_of(comm, needs(layout))) is None:
        return
    results, told = [], ()
    for resumed in (False, True):
        mesh, executor, trainer, lines = prepared("deep", part, layout, **settings("adam", 13))
        if resumed:
            State(executor).prepare(Tensors(shared_tmp_path, index(shared_tmp_path, *told)))()
            trainer.state.step = SAVED
        else:
            train_until(trainer, SAVED)
            told = save(mesh, executor, shared_tmp_path)
        trainer.train()
        results.append(([line["loss"] for line in lines][-(STEPS - SAVED) :], all_weights(executor, mesh)))
        mesh.close()
    assert results[0][0] == results[1][0]
    assert all(torch.equal(weight, results[1][1][name]) for name, weight in results[0][1].items())
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(comm, shared_tmp_path):
    mesh, executor, trainer, _ = prepared("masked", comm, "1x1", **settings("adam", 13))
    train_until(trainer, 2)
    told = save(mesh, executor, shared_tmp_path)
    mesh.close()
    mesh, executor, _, _ = prepared("deep", comm, "1x1", **settings("adam", 13))
    before = all_weights(executor, mesh)
    with pytest.raises(CheckpointError, match="^weights/layers.1.0.weight is float64 .*, and this model has"):
        State(executor).prepare(Tensors(shared_tmp_path, index(shared_tmp_path, *told)))()
    assert all(torch.equal(weight, before[name]) for name, weight in all_weights(executor, mesh).items())
    assert not states(executor)
    mesh.close()
