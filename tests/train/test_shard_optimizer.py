"""An optimizer that is shared out among the replicas trains what a whole one trains, to the bit."""

import pytest
import torch
from torch import nn

from hpctrain.model.weights import combined, fingerprints
from hpctrain.train.optimizer import state_bytes
from hpctrain.train.sharded_update import ShardedUpdate
from hpctrain.train.update import Update
from tests.planted.shard_bugs import BUGS
from tests.train.recommender import Recommender
from tests.train.test_equivalence import OPTIMIZERS, TASKS, part_of, settings
from tests.train.test_executor import WithPoison, executor_of, poisoned_step
from tests.train.toys import CLASSES, WIDTH, Masked, Unused, run

LAYOUTS = {
    "1x4": {"num_microbatches": 2},
    "2x2": {"stages": 2, "num_microbatches": 4},
    "2x2 zb-h1": {"stages": 2, "num_microbatches": 4, "schedule": "zb-h1"},
}


def both(task, comm, **how):
    """Losses, sha256 of the weights, and the executor: with a whole optimizer, and with a shared one."""
    results = []
    for shared in (False, True):
        losses, weights, executor = run(task, comm, **{"steps": 6, "shard_optimizer": shared, **how})
        assert isinstance(executor.update, ShardedUpdate) == shared
        results.append((losses, combined(fingerprints(weights)), executor))
    return results


@pytest.fixture
def four(comm):
    """A communicator over four of the ranks; None on the others."""
    part = part_of(comm, 4)
    yield part
    if part is not None:
        part.Free()


def assert_same_bits(task, comm, **how):
    plain, shared = both(task, comm, **how)
    assert shared[:2] == plain[:2]


@pytest.mark.mpi(min_size=4)
@pytest.mark.wide_if(case=lambda optimizer, layout: (OPTIMIZERS.index(optimizer) - list(LAYOUTS).index(layout)) % 3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_gives_the_same_bits(four, optimizer, layout):
    """With parameters that no rank uses, or some steps do not, and a learning rate that changes."""
    how = {"precision": "float32", "lr_schedule": "cosine", **settings(optimizer, 13), **LAYOUTS[layout]}
    if four is not None:
        assert_same_bits(Unused(), four, **how)


@pytest.mark.mpi(min_size=4)
@pytest.mark.wide_if(case=lambda task, layout: (layout == "2x2") != (task in ("deep", "tied")))
@pytest.mark.parametrize("layout", ("1x4", "2x2"))
@pytest.mark.parametrize("task", ("masked", "deep", "frozen", "tied", "text"))
def test_every_model_gives_the_same_bits(four, task, layout):
    if four is not None:
        assert_same_bits(TASKS[task], four, **settings("adamw", 13), **LAYOUTS[layout])


@pytest.mark.mpi(min_size=3)
@pytest.mark.wide_if(case=lambda replicas, precision: (replicas == 3) != (precision == "bf16-mixed"))
@pytest.mark.parametrize("replicas", (2, 3))
@pytest.mark.parametrize("precision", ("float32", "bf16-mixed"))
def test_any_number_of_replicas_gives_the_same_bits(comm, replicas, precision):
    if (part := part_of(comm, replicas)) is not None:
        assert_same_bits(TASKS["images"], part, precision=precision, **settings("adam", 7))
        part.Free()


def test_one_process_has_nothing_to_share_out():
    losses, weights, executor = run(Masked(), steps=3, shard_optimizer=True)
    assert type(executor.update) is Update and executor.update.gathers == ()
    expected, theirs, _ = run(Masked(), steps=3)
    assert losses == expected and fingerprints(weights) == fingerprints(theirs)


@pytest.mark.mpi(min_size=4)
@pytest.mark.wide_if(case=lambda task, layout: (layout == "2x2") != (task == "tied"))
@pytest.mark.parametrize("layout", ("1x4", "2x2"))
@pytest.mark.parametrize("task", ("masked", "tied"))
def test_the_norm_is_that_of_the_whole_gradient_on_every_rank(four, task, layout):
    """To rounding, where it is added up in another order; a gradient that is short enough keeps its bits."""
    if four is None:
        return
    plain, shared = both(TASKS[task], four, clip_norm=0.05, **settings("sgd", 13), **LAYOUTS[layout])
    norm = shared[2].update.result.gradient_norm
    assert four.allgather(norm) == [norm] * 4 and norm > 0.05
    assert norm == pytest.approx(plain[2].update.result.gradient_norm, rel=1e-12)
    assert shared[0] == pytest.approx(plain[0], rel=1e-12)
    assert_same_bits(TASKS[task], four, clip_norm=1e6, **settings("sgd", 13), **LAYOUTS[layout])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("clip_norm", (None, 0.05))
def test_tables_stay_whole_and_are_trained_as_before(comm, clip_norm):
    plain, shared = both(Recommender(), comm, clip_norm=clip_norm, **settings("adagrad", 10))
    assert shared[0] == pytest.approx(plain[0], rel=1e-12)
    assert clip_norm or shared[:2] == plain[:2]


@pytest.mark.mpi(min_size=2)
def test_a_skipped_step_leaves_weights_and_every_shard_as_they_were(comm):
    how = {"global_batch_size": comm.size, "on_nan": "skip"}
    executor, actions, mesh = executor_of(WithPoison(row=3), comm, shard_optimizer=True, **how)
    plain, plain_actions, plain_mesh = executor_of(WithPoison(row=3), comm, **how)
    step, _ = poisoned_step(executor, 3)
    for number in range(step + 3):
        result, expected = executor.run(actions, number), plain.run(plain_actions, number)
        assert result == expected and (result.skipped is not None) == (number == step)
    states = executor.optimizer.state.values() if executor.optimizer else ()
    assert {int(state["step"]) for state in states} <= {step + 2}
    ours, theirs = (each.stage.named_parameters() for each in (executor, plain))
    assert fingerprints(ours) == fingerprints(theirs)
    mesh.close()
    plain_mesh.close()


@pytest.mark.mpi(min_size=2)
def test_a_parameter_nobody_uses_has_no_state_on_any_rank(comm):
    _, _, executor = run(Unused(), comm, optimizer="adamw", global_batch_size=6, shard_optimizer=True)
    parts, state = executor.update.shard.parameters, executor.optimizer.state if executor.optimizer else {}
    steps = {name: int(state[part]["step"]) for name, part in parts.items() if part in state}
    told = {name: count for each in comm.allgather(steps) for name, count in each.items()}
    assert not any(name.startswith("layers.0.never") for name in told)
    assert 0 < told["layers.0.sometimes.weight"] < told["layers.0.always.weight"] <= 20


class Scalar(nn.Module):
    """Scales its scores by one number, all that it learns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x[..., :CLASSES] * self.scale


class Smallest(Masked):
    def layers(self):
        return [Scalar]


@pytest.mark.mpi(min_size=2)
def test_a_rank_may_own_nothing(comm):
    assert WIDTH >= CLASSES
    plain, shared = both(Smallest(), comm, **settings("adam", 13))
    assert shared[:2] == plain[:2]
    assert [each > 0 for each in comm.allgather(state_bytes(shared[2].optimizer))] == [True] + [False] * (comm.size - 1)
    assert (shared[2].optimizer is None) == (comm.rank > 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer, copies", [("sgd", 0), ("momentum", 1), ("adagrad", 1), ("adam", 2), ("adamw", 2)])
def test_each_rank_holds_its_share_of_the_state(comm, optimizer, copies):
    how = {"precision": "float32", "bucket_bytes": 1 << 20, "steps": 2, **settings(optimizer, 8)}
    plain, shared = (each[2] for each in both(TASKS["text"], comm, **how))
    whole, own = state_bytes(plain.optimizer), state_bytes(shared.optimizer)
    counts = sum(4 for state in shared.optimizer.state.values() if "step" in state)  # a number for each part
    weights = sum(parameter.nbytes for parameter in plain.gradients.parameters.values())
    padded = plain.gradients.flat.nbytes
    told = comm.allgather(own - counts)
    assert sum(told) == copies * weights and copies * weights <= whole
    assert max(told) <= copies * (padded / comm.size + 4)


def sent(comm, **how):
    """Bytes that all ranks sent to those that hold the same layers, and bytes of gradients of all ranks."""
    executor, actions, mesh = executor_of(comm=comm, global_batch_size=16, mesh=None, **how)
    before = mesh.data.ring.counters.bytes_sent
    executor.run(actions, 0)
    told = comm.allgather((mesh.data.ring.counters.bytes_sent - before, executor.gradients.flat.nbytes))
    mesh.close()
    return tuple(map(sum, zip(*told)))


@pytest.mark.mpi(min_size=2)
def test_as_many_bytes_travel_as_in_an_all_reduce(comm):
    whole, arena = sent(comm, task=Masked(), allreduce="ring")
    assert sent(comm, task=Masked(), shard_optimizer=True) == (whole, arena)
    assert whole == 2 * (comm.size - 1) * arena // comm.size


@pytest.mark.mpi(min_size=4)
def test_what_several_stages_hold_is_summed_whole(four):
    """So these buckets travel one and a half times: each of the two replicas sends another half of them."""
    if four is None:
        return
    plain, shared = both(TASKS["tied"], four, bucket_bytes=1, allreduce="ring", **settings("sgd", 13), **LAYOUTS["2x2"])
    before, after = (four.allreduce(each[2].update.mesh.data.ring.counters.bytes_sent) for each in (plain, shared))
    update = shared[2].update
    whole = [bucket.flat.nbytes for bucket in update.gradients.buckets if set(bucket.names) & update.tied.names]
    assert whole == [48 * 8] and after - before == 6 * four.allreduce(sum(whole) // 2)


@pytest.mark.mpi(min_size=2)
def test_sums_start_during_the_backward_and_all_weights_travel_together(comm):
    executor, actions, mesh = executor_of(
        Masked(), comm, global_batch_size=16, num_microbatches=2, shard_optimizer=True
    )
    log = []
    for kind in ("collectives", "gathers"):
        for number, each in enumerate(getattr(executor.update.reduction, kind)):
            for name in ("start", "wait"):
                call = getattr(each, name)
                setattr(each, name, lambda call=call, what=(kind, name, number): (log.append(what), call())[1])
    executor.watchers.append(lambda action, *times: log.append(str(action)))
    executor.run(actions, 0)
    numbers = range(len(executor.gradients.buckets))
    assert len(numbers) > 2 and log[log.index("F1") + 1 : log.index("B1")] == [
        ("collectives", "start", number) for number in numbers
    ]
    assert log[log.index("AGREE") + 1 : -1] == [("gathers", each, n) for each in ("start", "wait") for n in numbers]
    mesh.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_seen(comm, bug, monkeypatch):
    how = {"steps": 6, "clip_norm": 0.05, **settings("sgd", 12)}
    losses, weights, _ = run(Unused(), comm, **how)
    bug(monkeypatch)
    others, theirs, _ = run(Unused(), comm, shard_optimizer=True, **how)
    near = [torch.allclose(theirs[name], weights[name], rtol=0, atol=1e-10) for name in weights]
    assert any(comm.allgather(others != pytest.approx(losses, rel=1e-10) or not all(near)))
