"""The check of the first law sees what it is there to see."""

import pytest
import torch

from hpctrain import DataParallel, Mesh
from hpctrain.train.errors import AgreedError
from tests.planted.learning_bugs import EVALUATION, TRAINING
from tests.planted.loop_bugs import JOIN, LOOP
from tests.planted.pipeline_bugs import ASYNCHRONOUS, SYNCHRONOUS
from tests.planted.train_bugs import BUGS
from tests.train.borders import TiedTwice
from tests.train.loops import assert_close, assert_same_everywhere, loss_of, mean_loss, net, rows, share
from tests.train.test_asynchronous import compare_to_history
from tests.train.test_equivalence import MORE, TASKS, assert_equal_to_reference, part_of, reference, settings
from tests.train.test_learning import lines_of
from tests.train.toys import Mixing, run


def named(bug):
    return bug.__name__


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", BUGS, ids=named)
def test_a_planted_bug_turns_equivalence_red(comm, bug, monkeypatch):
    task, optimizer, rows = "unused", "adamw", 12
    reference(task, optimizer, rows)
    bug(monkeypatch)
    with pytest.raises((AssertionError, AgreedError)):
        losses, weights, _ = run(TASKS[task], comm, num_microbatches=2, **settings(optimizer, rows))
        assert_equal_to_reference(losses, weights, task, optimizer, rows)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", SYNCHRONOUS, ids=named)
def test_a_planted_bug_of_a_pipeline_turns_equivalence_red(comm, bug, monkeypatch):
    MORE["tied-dropout"] = TiedTwice(dropout=0.3)
    how = {"steps": 4, "clip_norm": SYNCHRONOUS[bug].get("clip_norm")}
    reference("tied-dropout", "sgd", 13, num_microbatches=4, **how)
    if (part := part_of(comm, 2)) is None:
        return
    bug(monkeypatch)
    with pytest.raises((AssertionError, AgreedError)):
        losses, weights, _ = run(
            MORE["tied-dropout"],
            part,
            stages=2,
            num_microbatches=4,
            **{**how, **SYNCHRONOUS[bug]},
            **settings("sgd", 13),
        )
        assert_equal_to_reference(losses, weights, "tied-dropout", "sgd", 13, num_microbatches=4, **how)
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", ASYNCHRONOUS, ids=named)
def test_a_planted_bug_of_the_stash_differs_from_the_history(comm, bug, monkeypatch):
    if (part := part_of(comm, 2)) is None:
        return
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        compare_to_history(part, ASYNCHRONOUS[bug], False, 2, 1, 3, "sgd")
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", TRAINING, ids=named)
def test_a_planted_bug_of_learning_turns_equivalence_red(comm, bug, monkeypatch):
    how = {"clip_norm": 0.05, "lr_schedule": "linear"}
    reference("masked", "sgd", 13, **how)
    bug(monkeypatch)
    losses, weights, _ = run(TASKS["masked"], comm, **how, **settings("sgd", 13))
    with pytest.raises(AssertionError):
        assert_equal_to_reference(losses, weights, "masked", "sgd", 13, **how)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", EVALUATION, ids=named)
def test_a_planted_bug_of_evaluation_changes_its_metrics(comm, bug, monkeypatch):
    def metrics():
        lines, _ = lines_of(Mixing(), comm, steps=2, eval_every=2)
        return lines[-1]["eval"]["loss"]

    right = metrics()
    bug(monkeypatch)
    assert metrics() != pytest.approx(right, rel=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", LOOP, ids=named)
def test_a_planted_bug_in_a_loop_of_ones_own_is_seen(comm, bug, monkeypatch):
    bug(monkeypatch)
    with Mesh(comm) as mesh:
        model, plain = DataParallel(net(), mesh), net()
        for step in range(8):
            for each, loss in ((model, loss_of(model, share(step, mesh))), (plain, mean_loss(plain, step, mesh))):
                each.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in each.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.1 * parameter.grad
        seen = mesh.world.all_gather_json(differs(model.module, plain))
    assert any(seen)


def differs(model, plain) -> bool:
    try:
        assert_close(model, plain)
    except AssertionError:
        return True
    return False


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bug", JOIN, ids=named)
def test_a_planted_bug_of_join_is_seen(comm, bug, monkeypatch):
    bug(monkeypatch)
    with Mesh(comm) as mesh:
        model = DataParallel(net(), mesh)
        optimizer = torch.optim.Adam(model.parameters())
        with model.join(optimizer):
            for number in range(1 + mesh.rank):
                model.zero_grad()
                loss_of(model, rows(number, 3)).backward()
                optimizer.step()
        try:
            assert_same_everywhere(mesh, list(model.parameters())[:1])
            seen = False
        except AssertionError:
            seen = True
        assert any(mesh.world.all_gather_json(seen))
