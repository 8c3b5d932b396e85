"""Training that sends a part of its gradients and keeps the rest for later: the sums of an oracle, on all replicas."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain import DataParallel, Mesh
from hpctrain.config import Config, UsageError
from hpctrain.model.compressors import Gather
from hpctrain.model.weights import combined, fingerprints
from hpctrain.train.errors import AgreedError
from hpctrain.train.feedback import FeedbackReduction
from tests.oracles import feedback
from tests.planted import feedback_bugs
from tests.planted.feedback_bugs import a_skipped_step_is_kept
from tests.train.loops import WIDTH, assert_learns_in_a_join, loss_of, net, share
from tests.train.test_equivalence import TASKS, assert_equal_to_reference, part_of, settings
from tests.train.test_executor import WithPoison, executor_of, poisoned_step
from tests.train.toys import Masked, run

HOW = {"topk": "topk:0.05", "powersgd": "powersgd:1"}
NUM_STEPS = 4


@pytest.fixture
def mesh(comm):
    with Mesh(comm) as mesh:
        yield mesh


def wrapped(mesh, compress, reduction="mean", dtype=torch.float64):
    return DataParallel(net(dtype=dtype), mesh, reduction, bucket_bytes=1 << 30, compress=compress)


def compare(comm, compress, reduction="mean") -> str:
    """What differs from the oracle, or between ranks, in some backwards in a row; the weights stay as they are."""
    with Mesh(comm) as mesh:
        model, plain = wrapped(mesh, compress, reduction), net()
        gradients = model._gradients._flat
        exchange = model._gradients._sums.collectives[0]
        matrices = getattr(exchange._compressor, "_matrices", [])
        starts = [each.start.numpy().copy() for each in matrices]
        told, found = [], []
        for step in range(NUM_STEPS):
            for each in (model, plain):
                each.zero_grad()
                loss_of(each, share(step, mesh)).backward()
            own = torch.zeros_like(gradients.flat)
            for name, place in gradients.places.items():
                gradient = plain.get_parameter(name).grad
                if gradient is not None:
                    own[place] = gradient.reshape(-1)
            told.append(comm.allgather(own.numpy()))
            found.append((gradients.flat.numpy().copy(), exchange.kept.numpy().copy()))
        if compress.startswith("topk"):
            expected = feedback.top_k(told, Fraction(compress.removeprefix("topk:")))
        else:
            described = [(each.place, (each.rows, each.columns)) for each in matrices]
            expected = feedback.power_sgd(told, described, starts)
        everybody = [comm.allgather(ours.tobytes()) for ours, _ in found]
        for step, ((ours, kept), (total, theirs)) in enumerate(zip(found, expected)):
            mean = total / (mesh.size if reduction == "mean" else 1)
            if len(set(everybody[step])) > 1:
                return f"step {step}: ranks hold different bits"
            if not np.allclose(ours, mean, rtol=0, atol=1e-11):
                return f"step {step}: off by {np.abs(ours - mean).max()}"
            if not np.allclose(kept, theirs[mesh.rank], rtol=0, atol=1e-11):
                return f"step {step}: keeps another rest"
    return ""


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("compress", ["topk:0.05", "topk:0.5", "powersgd:1", "powersgd:2"])
def test_a_loop_of_ones_own_gets_what_the_oracle_says(comm, compress, reduction):
    assert not any(comm.allgather(compare(comm, compress, reduction)))


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("name", HOW)
def test_a_planted_bug_is_seen(comm, monkeypatch, name):
    compress = "topk:0.5" if name == "topk" else HOW[name]
    for bug in feedback_bugs.TOP_K if name == "topk" else feedback_bugs.POWER_SGD:
        with monkeypatch.context() as planted:
            bug(planted)
            assert any(comm.allgather(compare(comm, compress))), bug.__name__
    assert not any(comm.allgather(compare(comm, compress)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("task", ["masked", "unused"])
def test_all_numbers_and_full_rank_equal_one_process(comm, task):
    """No matrix of these tasks is larger than its factors of rank 4."""
    for compress in ("topk:1", "powersgd:4"):
        losses, weights, executor = run(TASKS[task], comm, compress=compress, **settings("adamw", 13))
        assert isinstance(executor.update.reduction, FeedbackReduction)
        assert_equal_to_reference(losses, weights, task, "adamw", 13)


LAYOUTS = {"1x4": {"num_microbatches": 2}, "2x2": {"stages": 2, "num_microbatches": 4}}


@pytest.mark.mpi(min_size=4)
@pytest.mark.wide_if(case=lambda compress, layout: (layout == "2x2") != (compress == "powersgd:1"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compress", ["topk:0.1", "powersgd:1"])
def test_it_learns_and_all_replicas_hold_the_same_bits(comm, compress, layout):
    if (part := part_of(comm, 4)) is None:
        return
    how = {"precision": "float32", "clip_norm": 10.0, "steps": 60, **settings("sgd", 37), **LAYOUTS[layout]}
    plain, _, _ = run(TASKS["masked"], part, **how)
    losses, weights, executor = run(TASKS["masked"], part, compress=compress, **how)
    assert losses != plain
    assert plain[0] - losses[-1] > 0.7 * (plain[0] - plain[-1]) > 0.05
    hashes = part.allgather(combined(fingerprints(executor.stage.named_parameters())))
    assert len(set(hashes)) == LAYOUTS[layout].get("stages", 1)
    figures = executor.update.reduction.figures()
    assert {each["compress"] for each in figures} == {compress} and all(each["seconds"] > 0 for each in figures)
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", ["topk:0.1", "powersgd:1"])
def test_much_less_is_sent(comm, compress):
    def sent(**how):
        executor, actions, mesh = executor_of(
            comm=comm, task=Wide(), global_batch_size=16, bucket_bytes=1 << 30, precision="float32", **how
        )
        before = mesh.data.ring.counters.bytes_sent
        executor.run(actions, 0)
        total = comm.allreduce(mesh.data.ring.counters.bytes_sent - before)
        share_of_figures = executor.update.reduction.collectives[0].traffic if "compress" in how else None
        nbytes = executor.gradients.flat.nbytes
        mesh.close()
        return total, share_of_figures, nbytes

    (whole, _, _), (part, traffic, nbytes) = sent(allreduce="ring"), sent(allreduce="ring", compress=compress)
    assert part < whole * (0.2 * comm.size / 2 * 1.1 if compress.startswith("topk") else 0.2)
    assert part == pytest.approx(traffic * nbytes * comm.size, rel=0.01)


class Wide(Masked):
    """With one large matrix."""

    def layers(self):
        return [lambda: nn.Linear(6, 200), lambda: nn.Linear(200, 200), lambda: nn.Linear(200, 4)]


def after_a_skipped_step(comm, compress) -> bool:
    """Whether a run with a step that is skipped goes on as one without it."""
    how = {"global_batch_size": comm.size, "compress": compress}
    executor, actions, mesh = executor_of(WithPoison(row=3), comm, on_nan="skip", **how)
    plain, plain_actions, plain_mesh = executor_of(WithPoison(row=3), comm, on_nan="skip", **how)
    step, _ = poisoned_step(executor, 3)
    for number in range(step + 3):
        result = executor.run(actions, number)
        assert (result.skipped is not None) == (number == step)
        if number != step:
            plain.run(plain_actions, number)
    kept = [each.kept.clone() for each in executor.update.reduction.collectives]
    theirs = [each.kept.clone() for each in plain.update.reduction.collectives]
    same = fingerprints(executor.stage.named_parameters()) == fingerprints(plain.stage.named_parameters())
    mesh.close()
    plain_mesh.close()
    assert any(each.any() for each in theirs) or not all(map(torch.equal, kept, theirs))
    return same and all(map(torch.equal, kept, theirs))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", ["topk:0.1", "powersgd:1"])
def test_a_skipped_step_leaves_what_is_kept_as_it_was(comm, compress, monkeypatch):
    assert all(comm.allgather(after_a_skipped_step(comm, compress)))
    a_skipped_step_is_kept(monkeypatch)
    assert not all(comm.allgather(after_a_skipped_step(comm, compress)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", HOW.values())
def test_a_sum_that_is_not_finite_leaves_what_is_kept_as_it_was(comm, compress):
    """In a loop of one's own, where nobody says whether a step was made."""
    with Mesh(comm) as mesh:
        model = wrapped(mesh, compress)
        exchange = model._gradients._sums.collectives[0]
        for step, factor in enumerate((1.0, float("nan"), 1.0)):
            before = exchange.kept.clone()
            model.zero_grad()
            (loss_of(model, share(step, mesh)) * (factor if mesh.rank == 0 else 1.0)).backward()
            is_finite = all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)
            assert is_finite == (factor == 1.0) and torch.equal(before, exchange.kept) == (not is_finite)
            assert torch.isfinite(exchange.kept).all()


class Pausing(nn.Module):
    """With a layer that some steps leave out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, pauses: bool):
        return self.first(x) if pauses else self.second(self.first(x))


def after_a_pause(mesh, compress) -> bool:
    """Whether what is kept of a layer outlives a step in which no rank uses it, and goes into the next one."""
    model = DataParallel(net(build=Pausing), mesh, "sum", bucket_bytes=1 << 30, compress=compress)
    plain = net(build=Pausing)
    exchange, flat = model._gradients._sums.collectives[0], model._gradients._flat
    places = [place for name, place in flat.places.items() if "second" in name]
    given, got = (torch.zeros_like(exchange.kept) for _ in range(2))
    stays = True
    for step, pauses in enumerate((False, True, False)):
        before = exchange.kept.clone()
        for each in (model, plain):
            each.zero_grad()
            loss_of(partial(each, pauses=pauses), share(step, mesh)).backward()
        assert (model.module.second.weight.grad is None) == pauses
        same = all(torch.equal(before[place], exchange.kept[place]) for place in places)
        stays = stays and (same or not pauses)
        for name, place in flat.places.items():
            own = plain.get_parameter(name).grad
            if own is not None:
                given[place] += own.reshape(-1)
                got[place] += flat.flat[place]
    assert any(mesh.world.comm.allgather(any(before[place].any() for place in places))), "something was kept"
    left = torch.from_numpy(sum(mesh.world.comm.allgather((given - exchange.kept).numpy())))
    return stays and torch.allclose(left, got, rtol=0, atol=1e-10)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", ["topk:0.3", "powersgd:1"])
def test_nothing_is_lost_of_a_parameter_that_a_step_does_not_use(mesh, compress, monkeypatch):
    assert all(mesh.world.comm.allgather(after_a_pause(mesh, compress)))
    feedback_bugs.what_nobody_used_is_sent_and_lost(monkeypatch)
    assert not any(mesh.world.comm.allgather(after_a_pause(mesh, compress)))


class Empty(nn.Module):
    """With a parameter of no numbers, in a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.none = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.layer(x) + self.none.sum()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", [*HOW.values(), "topk:1"])
def test_a_parameter_of_no_numbers_goes(mesh, compress):
    model = DataParallel(net(build=Empty), mesh, bucket_bytes=1, compress=compress)
    for step in range(2):
        model.zero_grad()
        loss_of(model, share(step, mesh)).backward()
    assert model.module.none.grad.shape == (0, 3) and model.module.layer.weight.grad.any()
    figures = model._gradients._sums.figures()
    assert [each["bytes"] == 0 for each in figures].count(True) == 1


class Everything:
    """A compressor that sends all there is, by a gather."""

    def bucket(self, number, flat, parts, rank, num_ranks):
        self.message, self.rank = torch.zeros(num_ranks, len(flat), dtype=flat.dtype), rank
        return self

    def exchange(self, flat, left):
        self.message[self.rank] = left
        left.zero_()
        yield Gather(self.message)
        torch.sum(self.message, 0, out=flat)

    def settle(self, applied):
        assert applied


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", [*HOW.values(), "everything"])
def test_own_compressors_and_join_and_no_sync(comm, compress):
    with Mesh(comm) as mesh:
        model = wrapped(mesh, Everything() if compress == "everything" else compress, dtype=torch.float32)
        assert_learns_in_a_join(mesh, model, 20 + mesh.rank, accumulates=True)


@pytest.mark.mpi
def test_what_does_not_go_is_refused_by_one_line(comm):
    with Mesh(comm) as mesh:
        for compress, algorithm, words in [
            ("topk:2", "auto", "compress='topk:2': expected none, bf16, topk:FRACTION or powersgd:RANK"),
            (object(), "auto", r"compress: object has no method bucket\(\)"),
        ]:
            with pytest.raises(ValueError, match=words):
                DataParallel(net(), mesh, algorithm=algorithm, compress=compress)
        with pytest.raises(ValueError, match="first.weight is float16; only gradients of float32 and float64"):
            DataParallel(net(dtype=torch.float16), mesh, compress="topk:0.1")
        if mesh.size > 1:
            for algorithm, compress in [("windows", "topk:0.1"), ("doubling", "topk:0.1"), ("windows", "powersgd:1")]:
                with pytest.raises(ValueError, match=f"algorithm='{algorithm}': what {compress} sends does not go so"):
                    DataParallel(net(), mesh, algorithm=algorithm, compress=compress)
                with pytest.raises(UsageError, match=f"--compress {compress}: .*leave --allreduce {algorithm} out"):
                    Config(allreduce=algorithm, compress=compress)
            with pytest.raises(ValueError, match="algorithm='windows': what Everything sends does not go so"):
                DataParallel(net(), mesh, algorithm="windows", compress=Everything())
            with pytest.raises(AgreedError, match="compress='Everything'"):
                DataParallel(net(), mesh, compress=Everything() if mesh.rank else "none")
