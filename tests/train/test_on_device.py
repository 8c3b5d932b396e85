"""Training on a device gives what training on the host gives, bit for bit where both compute alike.

The device is tests/comm/pretend.py: so every tensor is seen to be where it is used, and what travels goes through the
code for devices, staged through the host's memory or handed to mpi4py as memory of a device.
"""

import json
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hpctrain.comm.device_buffer import allocator
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.finite import Finite
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.random_state import CPU
from hpctrain.plan.schedule import Op
from hpctrain.train import command
from hpctrain.train.build import build_executor
from hpctrain.train.checkpoint_pieces import Tensors, index
from hpctrain.train.checkpoint_state import State
from hpctrain.train.errors import NotFinite
from hpctrain.train.layout import settled
from hpctrain.train.trainer import Trainer
from tests.comm.pretend import DEVICE, WAITS, pretending
from tests.train.recommender import Recommender
from tests.train.serving import train
from tests.train.test_checkpoint_state import SAVED, needs, prepared, save, train_until
from tests.train.test_equivalence import TASKS, part_of
from tests.train.test_executor import WithPoison
from tests.train.test_resume import TOYS
from tests.train.toys import Mixing, all_weights, run

PATHS = {"staged": "0", "direct": "1"}
REPLICAS = {
    "masked": {"allreduce": "windows"},
    "deep": {"num_microbatches": 3, "clip_norm": 0.1},
    "unused": {"shard_optimizer": True, "optimizer": "adagrad"},
    "tied": {"on_nan": "skip", "recompute": True},
    "frozen": {"compress": "bf16", "precision": "float32"},
    "mixing": {},
    "tables": {"clip_norm": 0.5},
}
PIPELINES = {
    "masked": {"schedule": "f-then-b"},
    "deep": {"schedule": "1f1b-interleaved", "chunks": 2},
    "tied": {"schedule": "zb-h1"},
    "unused": {"schedule": "1f1b-async", "clip_norm": 0.5},
    "frozen": {"schedule": "2bw", "recompute": True},
    "mixing": {"schedule": "1f1b", "eval_every": 10},
}


MORE = {"mixing": Mixing(), "tables": Recommender(padded=True)}


def task_of(name: str):
    return MORE[name] if name in MORE else TASKS[name]


def assert_same(on_host, on_device):
    losses, weights, _ = on_host
    assert on_device[0] == losses
    for name, weight in (weights or {}).items():  # a server has none
        assert torch.equal(on_device[1][name].cpu(), weight), name


def compare(comm, path, monkeypatch, name, **settings):
    """On the ranks of `comm`, on the host and on the device."""
    monkeypatch.setenv("HPCTRAIN_CUDA_AWARE", PATHS[path])
    on_host = run(task_of(name), comm, **settings)
    with pretending(is_for_mpi=path == "direct"):
        on_device = run(task_of(name), comm, device=DEVICE, **settings)
    assert_same(on_host, on_device)
    return on_device


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda path, name: (path == "direct") == (name in ("masked", "mixing", "tied", "frozen")))
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_on_devices_equal_those_on_the_host(comm, path, name, monkeypatch):
    settings = {"optimizer": "adam", "allreduce": "ring", "steps": 8, "eval_every": 4, **REPLICAS[name]}
    for num_ranks in (1, 3) if path == "staged" else (3,):
        part = part_of(comm, num_ranks)
        if part is not None:
            compare(part, path, monkeypatch, name, **settings)
            part.Free()


@pytest.mark.mpi(min_size=4)
@pytest.mark.wide_if(case=lambda path, name: (path == "direct") == (name in ("masked", "mixing", "tied")))
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_on_devices_equal_those_on_the_host(comm, path, name, monkeypatch):
    settings = {"optimizer": "adam", "steps": 8, "allreduce": "ring", "num_microbatches": 4, **PIPELINES[name]}
    part = part_of(comm, 4)
    if part is not None:
        compare(part, path, monkeypatch, name, stages=4 if name == "frozen" else 2, **settings)
        part.Free()


SERVED = {
    "bulk": {},
    "each worker steps": {"update": "worker", "clip_norm": 0.5},
    "delayed": {"delay": 1},
    "windowed": {"delay_window": 1},
    "dense by the ring": {"dense_via": "ring"},
}


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("how", SERVED)
def test_workers_on_devices_equal_those_on_the_host(comm, how, monkeypatch):
    """Tables, and all that is pushed and pulled, are on the host."""
    monkeypatch.setenv("HPCTRAIN_CUDA_AWARE", "0")
    part = part_of(comm, 3)
    if part is None:
        return
    settings = {"optimizer": "adam", "steps": 8, "eval_every": 4, **SERVED[how]}
    on_host = train(part, Recommender(), 2, 1, **settings)
    with pretending():
        on_device = train(part, Recommender(), 2, 1, device=DEVICE, **settings)
    assert_same(on_host, on_device)
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_what_is_not_finite_on_a_device_is_told_by_parameter_and_rank(comm):
    """The device is asked at the end of the step, when a bucket is a sum already."""
    part = part_of(comm, 3)
    if part is None:
        return
    told = []
    for device in (CPU, DEVICE):
        with pretending() if device == DEVICE else nullcontext(), pytest.raises(NotFinite) as caught:
            run(WithPoison(row=3), part, device=device, allreduce="ring", global_batch_size=3)
        told.append(str(caught.value))
    assert told[0] == told[1] and "not finite: the gradient of layers.0.one on rank" in told[0]
    part.Free()


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda task, saved_on, **_: (task == "deep") == (saved_on == DEVICE))
@pytest.mark.parametrize("layout, task", [("1x3", "recommender"), ("1x4 shared", "deep")])
@pytest.mark.parametrize("saved_on, taken_on", [(DEVICE, CPU), (CPU, DEVICE), (DEVICE, DEVICE)])
def test_what_a_device_saves_the_host_takes_over_and_back(comm, shared_tmp_path, layout, task, saved_on, taken_on):
    part = part_of(comm, needs(layout))
    if part is None:
        return
    how = {"optimizer": "adam", "lr": 0.01, "allreduce": "ring"}
    mesh, executor, trainer, _ = prepared(task, part, layout, **how)
    trainer.train()
    expected = all_weights(executor, mesh)
    mesh.close()
    with pretending():
        mesh, executor, trainer, _ = prepared(task, part, layout, saved_on, **how)
        train_until(trainer, SAVED)
        found = save(mesh, executor, shared_tmp_path)
        mesh.close()
        mesh, executor, trainer, _ = prepared(task, part, layout, taken_on, **how)
        State(executor).prepare(Tensors(shared_tmp_path, index(shared_tmp_path, *found)))()
        trainer.state.step = SAVED
        trainer.train()
        weights = all_weights(executor, mesh)
        mesh.close()
    for name, weight in expected.items():
        assert torch.equal(weights[name].cpu(), weight), name
    part.Free()


@pytest.mark.parametrize("name", ("text", "images"))
def test_the_host_waits_for_a_device_once_a_step_is_told_and_not_before(name):
    """So the device has its next work before it is done with what it has: on a real one that is most of its speed."""
    config = settled(Config(steps=3, num_microbatches=3, bucket_bytes=100, clip_norm=1.0), 1)
    told = []
    with pretending(), Mesh() as mesh:
        executor = build_executor(config, task_of(name), mesh, device=DEVICE)
        executor.watchers.append(lambda action, *_: told.append((action.op, WAITS[0])))
        trainer = Trainer(config, executor, mesh, lambda line: None)
        WAITS[0] = 0
        trainer.train()
    waits = {op: 0 for op, _ in told}
    for (_, before), (op, after) in pairwise([(None, 0), *told]):
        waits[op] += after - before
    assert waits.pop(Op.AGREE) > 0 and waits.pop(Op.STEP) > 0
    assert not any(waits.values()), waits


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("flags", [("--allreduce", "ring"), ("--stages", "2"), ("--servers", "1")], ids=" ".join)
def test_a_whole_run_on_devices_leaves_what_one_on_the_host_leaves(comm, shared_tmp_path, monkeypatch, flags):
    """From the command line to the last file: weights, checkpoints, evaluations, summary."""
    part = part_of(comm, 2)
    if part is None:
        return
    argv = ["--task", f"{TOYS}:Masked", "--precision", "float64", "--steps", "4", "--checkpoint-every", "2"]
    argv += ["--eval-every", "2", "--threads", "1", *flags]
    found = []
    for name in ("host", "device"):
        folder = shared_tmp_path / name
        with pretending() if name == "device" else nullcontext(), monkeypatch.context() as here:
            if name == "device":
                here.setattr("hpctrain.train.run.take", lambda number: DEVICE)
            assert command.run([*argv, "--run-dir", str(folder), "--device", "cpu"], part) == 0
        Mesh(part).close()  # rank 0 has written
        found.append(json.loads((folder / "summary.json").read_text()))
    on_host, on_device = found
    assert on_device["weights_sha256"] == on_host["weights_sha256"] and on_device["eval"] == on_host["eval"]
    assert on_host["staged_bytes"] == 0 < on_device["staged_bytes"] and on_device["peak_device_bytes"][0] == 1
    assert on_device["environment"]["device"] == f"{DEVICE} none at all"
    part.Free()


def test_finite_gradients_whose_sum_overflows_are_finite_on_a_device_too():
    with pretending():
        parameter = torch.nn.Parameter(torch.zeros(4).to(DEVICE))
        gradients = FlatGradients({"large": parameter}, allocator(DEVICE), 1)
        for value, found in ((3e38, []), (float("inf"), ["large"])):
            gradients.views["large"].fill_(value)
            looked = Finite(gradients)
            looked.look_at(gradients.buckets[0])
            assert list(looked.not_finite()) == found


def test_a_rank_is_slowed_on_a_device_too():
    config = settled(Config(steps=1, num_microbatches=2), 1)
    told = []
    with pretending(), Mesh() as mesh:
        executor = build_executor(config, task_of("text"), mesh, device=DEVICE)
        executor.straggle = SimpleNamespace(after=lambda step, seconds: told.append(seconds))
        Trainer(config, executor, mesh, lambda line: None).train()
    assert len(told) == 1 and told[0] > 0 and not executor.timing.runs[0], "what it takes the device is not known"
