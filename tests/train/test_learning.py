"""What people expect of a trainer: schedule, clipping, evaluations, early stop, mixed precision, BatchNorm."""

import pytest
import torch
from torch import nn

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.train.build import build_evaluation, build_executor
from hpctrain.train.errors import AgreedError
from hpctrain.train.trainer import Trainer
from tests.train.test_equivalence import TASKS, assert_equal_to_reference, part_of, settings
from tests.train.toys import WIDTH, Masked, Mixing, MixRows, Tied, run


def lines_of(task, comm=None, **settings):
    """What a run notes, and its trainer."""
    config = Config(**{"precision": "float64", "steps": 6, "global_batch_size": 9, **settings})
    lines = []
    with Mesh(comm) as mesh:
        executor = build_executor(config, task, mesh)
        trainer = Trainer(config, executor, mesh, lines.append, build_evaluation(config, task, mesh))
        trainer.check()
        trainer.train()
    return lines, trainer


def test_the_learning_rate_of_each_step_is_noted_and_used():
    shape = {"lr": 0.5, "lr_schedule": "linear", "lr_warmup_steps": 2, "lr_min": 0.1, "optimizer": "sgd"}
    lines, trainer = lines_of(Masked(), steps=4, **shape)
    assert [line["lr"] for line in lines] == pytest.approx([0.25, 0.5, 0.5, 0.1])
    _, steady = lines_of(Masked(), steps=1, lr=0.25, optimizer="sgd")
    _, rising = lines_of(Masked(), steps=1, lr=0.5, lr_warmup_steps=2, optimizer="sgd")
    assert trainer.executor.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    for name, weight in steady.executor.stage.named_parameters().items():
        assert torch.equal(weight, rising.executor.stage.named_parameters()[name])


def test_clipping_shortens_the_gradient_of_all_parameters_together():
    lines, trainer = lines_of(Masked(), steps=1, clip_norm=0.01, optimizer="sgd")
    squares = sum(float(view.square().sum()) for view in trainer.executor.gradients.views.values())
    assert lines[0]["gradient_norm"] > 0.02
    assert squares**0.5 == pytest.approx(0.01, rel=1e-3)
    free, _ = lines_of(Masked(), steps=1)
    assert free[0]["gradient_norm"] is None


@pytest.mark.parametrize("optimizer", ("sgd", "adamw"))
def test_clipping_is_that_of_a_plain_torch_loop_bit_for_bit(optimizer):
    """Frozen and unused parameters count for nothing, tied ones once."""
    for task in (TASKS["unused"], TASKS["frozen"], Tied()):
        _, clipped, executor = run(task, optimizer=optimizer, clip_norm=0.05, global_batch_size=8, lr=0.1, steps=5)
        plain = plain_clipped(task, optimizer)
        for name, weight in clipped.items():
            assert torch.equal(weight, plain[name]), name


def plain_clipped(task, optimizer):
    from hpctrain.train.batches import GlobalSampler
    from hpctrain.train.build import build_model
    from hpctrain.train.loader import Reader, Request
    from tests.oracles.plain_loop import make_optimizer

    stage = build_model(Config(precision="float64"), task)
    dataset = task.dataset("train")
    sampler, reader = GlobalSampler(len(dataset), 8, 0), Reader(lambda: dataset, torch.float64)
    model = torch.nn.Sequential(*stage.layers)
    update = make_optimizer(optimizer, 0.1, 0.9, 0.0)(model.parameters())
    for step in range(5):
        update.zero_grad()
        inputs, targets = reader[Request(tuple(sampler.rows(step)))]
        total, items = task.loss(model(inputs), targets)
        total.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / items)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        update.step()
    return stage.named_parameters()


CLIPPED = ("masked", "unused", "frozen", "tied", "module")


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda task, microbatches: (CLIPPED.index(task) - (1, 3, 8).index(microbatches)) % 3)
@pytest.mark.parametrize("task", CLIPPED)
@pytest.mark.parametrize("microbatches", (1, 3, 8))
def test_clipping_and_accumulation_equal_one_process(comm, task, microbatches):
    how = {"clip_norm": 0.05, "lr_schedule": "cosine", "lr_warmup_steps": 3, "steps": 8}
    for replicas in {2, 3, comm.size} & set(range(comm.size + 1)):
        part = part_of(comm, replicas)
        if part is not None:
            losses, weights, _ = run(TASKS[task], part, num_microbatches=microbatches, **how, **settings("adam", 13))
            assert_equal_to_reference(losses, weights, task, "adam", 13, **how)
            part.Free()


def test_tied_parameters_are_one_and_equal_a_model_that_shares_them():
    _, weights, executor = run(Tied())
    assert "layers.0.weight" in weights and "layers.2.weight" not in weights
    assert executor.stage.layers[0].weight is executor.stage.layers[2].weight


def test_ties_hold_in_any_order():
    """Three matrices are one, also when the later pair names first what the earlier pair replaced."""

    class Chained(Masked):
        def layers(self):
            return [lambda: nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)] + super().layers()

        def ties(self):
            names = [f"layers.{i}.weight" for i in range(3)]
            return [(names[1], names[2]), (names[0], names[1])]

    _, _, executor = run(Chained(), steps=1)
    layers = executor.stage.layers
    assert layers[0].weight is layers[1].weight is layers[2].weight


@pytest.mark.parametrize(
    "pair, words",
    [
        (
            ("layers.0.weight", "layers.9.weight"),
            "ties() names layers.9.weight, which is no parameter; there is layers.0",
        ),
        (("layers.0.weight", "layers.4.weight"), "of shapes [8, 6] and [4, 8]; they should be equal"),
    ],
)
def test_ties_that_cannot_be_are_told(pair, words):
    task = Tied()
    task.ties = lambda: [pair]
    with pytest.raises(AgreedError) as caught:
        run(task)
    assert words in str(caught.value)


@pytest.mark.mpi
def test_evaluations_come_every_so_many_steps_and_at_the_end_once(comm):
    lines, trainer = lines_of(Masked(), comm, steps=7, eval_every=3)
    evaluated = [line for line in lines if "eval" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert set(evaluated[0]["eval"]) == {"loss", "rows"} and evaluated[0]["eval"] != evaluated[1]["eval"]
    alone, _ = lines_of(Masked(), steps=7, eval_every=3)
    theirs = [line["eval"]["loss"] for line in alone if "eval" in line]
    assert [line["eval"]["loss"] for line in evaluated] == pytest.approx(theirs, rel=1e-10)


class Scripted(Masked):
    """Held-out losses as a script has them, whatever the weights."""

    script = (5.0, 4.0, 4.5, 4.0, 4.2, 1.0)

    def metric(self, outputs, targets):
        return {"loss": (self.value, 1), "accuracy": (-self.value, 1)}


@pytest.mark.mpi
@pytest.mark.parametrize(
    "rule, steps",
    [("loss:3", 5), ("loss:2", 4), ("loss:9", 6), ("accuracy:3", 5), ("loss:1:max", 2), ("accuracy:1:min", 2)],
)
def test_early_stop_waits_for_so_many_evaluations_without_a_better_one(comm, rule, steps, monkeypatch):
    values = iter(Scripted.script)
    evaluate = Trainer.evaluate

    def next_value(self):
        Scripted.value = next(values)
        return evaluate(self)

    Scripted.value = 9.0
    monkeypatch.setattr(Trainer, "evaluate", next_value)
    lines, trainer = lines_of(Scripted(), comm, steps=6, eval_every=1, early_stop=rule)
    assert trainer.state.step == steps
    assert trainer.figures()["stopped_early"] == (steps < 6)
    assert trainer.figures()["steps"] == steps
    if rule == "loss:3":
        assert trainer.state.best == 4.0
        assert lines[-1]["stopped_early"] == "loss no better in 3 evaluations, best 4.0000 at step 2"


def test_nan_is_never_the_best(monkeypatch):
    values = iter([float("nan"), 5.0, 4.0, float("nan"), 3.0, 2.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"loss": next(values)})
    _, trainer = lines_of(Masked(), steps=6, eval_every=1, early_stop="loss:2")
    assert trainer.state.step == 6 and trainer.state.best == 2.0


def test_a_task_without_held_out_rows_is_not_evaluated():
    class Without(Masked):
        def dataset(self, split):
            return super().dataset(split) if split == "train" else None

    lines, _ = lines_of(Without(), steps=4, eval_every=2)
    assert len(lines) == 4


@pytest.mark.mpi
def test_a_metric_that_the_task_lacks_is_told_before_the_first_step(comm):
    with pytest.raises(AgreedError, match="--early-stop bleu:3: no such metric; there is loss, rows"):
        lines_of(Masked(), comm, eval_every=1, early_stop="bleu:3")


@pytest.mark.mpi
def test_eval_batches_take_evenly_spread_rows_each_once(comm):
    config = Config(global_batch_size=4, eval_batches=3, precision="float64")
    with Mesh(comm) as mesh:
        evaluation = build_evaluation(config, Masked(), mesh)
        rows = sum(mesh.world.all_gather_json(evaluation.rows), [])
    assert rows == [place * 37 // 12 for place in range(12)]
    assert len(set(rows)) == 12


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda task: task == "images")
@pytest.mark.parametrize("task", ("text", "images"))
def test_bf16_mixed_keeps_float32_weights_and_learns_what_float32_learns(comm, task):
    how = {"steps": 60, "optimizer": "adamw", "lr": 0.01, "global_batch_size": 16, "bucket_bytes": 4096}
    plain, _, _ = run(TASKS[task], comm, precision="float32", **how)
    mixed, weights, executor = run(TASKS[task], comm, precision="bf16-mixed", **how)
    again, others, _ = run(TASKS[task], comm, precision="bf16-mixed", **how)
    assert mixed != plain and mixed[-1] < 0.9 * mixed[0]
    assert sum(mixed[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.02)
    assert mixed == again
    for name, weight in weights.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, others[name])
    state = executor.optimizer.state_dict()["state"]
    assert all(state[key]["exp_avg"].dtype == torch.float32 for key in state)


@pytest.mark.mpi
def test_layers_that_mix_rows_equal_one_process_with_as_many_micro_batches(comm):
    losses, weights, executor = run(Mixing(), comm, num_microbatches=2, **settings("adam", 24))
    expected, theirs, _ = run(Mixing(), num_microbatches=2 * comm.size, **settings("adam", 24))
    assert losses == pytest.approx(expected, rel=1e-10)
    for name, weight in theirs.items():
        assert torch.allclose(weights[name], weight, rtol=0, atol=1e-10)
    assert executor.update.statistics.names == ["layers.0.norm"]


@pytest.mark.mpi(min_size=2)
def test_running_statistics_are_averaged_for_an_evaluation_and_go_on_by_themselves(comm):
    lines, trainer = lines_of(Mixing(), comm, steps=3)
    own = trainer.executor.stage.layers[0].norm.running_mean.clone()
    total = own * trainer.executor.update.items_seen
    comm.Allreduce(total.clone().numpy(), total.numpy())
    seen = comm.allreduce(trainer.executor.update.items_seen)
    with Mesh(comm) as mesh:
        trainer.evaluation = build_evaluation(trainer.config, Mixing(), mesh)
        trainer.executor.update.statistics._group = mesh.data
        seen_by_evaluation = []
        original = trainer.evaluation.run
        trainer.evaluation.run = lambda stage, links: (
            seen_by_evaluation.append(stage.layers[0].norm.running_mean.clone()) or original(stage, links)
        )
        trainer.evaluate()
    assert torch.allclose(seen_by_evaluation[0], total / seen)
    assert torch.equal(trainer.executor.stage.layers[0].norm.running_mean, own)


class Counting(nn.Module):
    """Sums up all that it ever saw, in a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + x.detach().sum((0, 1))
        return x


@pytest.mark.mpi
def test_a_skipped_step_leaves_no_nan_in_any_buffer(comm):
    class Poisoned(Mixing):
        def layers(self):
            return [Counting, lambda: nn.InstanceNorm1d(3, track_running_stats=True), *super().layers()]

        def dataset(self, split):
            rows = super().dataset(split)
            rows[3] = (rows[3][0] * float("nan"), rows[3][1].clamp(min=0))
            return rows

    losses, _, executor = run(Poisoned(), comm, on_nan="skip", steps=5, global_batch_size=37)
    assert losses == [None] * 5
    assert all(torch.isfinite(buffer).all() for buffer in executor.stage.named_buffers().values())
    assert executor.stage.layers[2].norm.num_batches_tracked == 0 and not executor.stage.layers[0].seen.any()


@pytest.mark.mpi
def test_instance_normalisation_is_evaluated_with_averages_and_mixes_no_rows(comm):
    """After one step, where all rows weigh alike, they are those of the whole batch."""

    class Instance(Masked):
        def layers(self):
            return [lambda: nn.InstanceNorm1d(3, track_running_stats=True), *super().layers()]

        def dataset(self, split):
            return [(x, y.clamp(min=0)) for x, y in super().dataset(split)]

    how = {"steps": 1, "eval_every": 1, "global_batch_size": 24 // comm.size * comm.size}
    (lines, trainer), (alone, _) = lines_of(Instance(), comm, **how), lines_of(Instance(), **how)
    assert trainer.executor.update.statistics.names == ["layers.0"] and trainer.executor.update.statistics.mixing == []
    assert lines[-1]["eval"]["loss"] == pytest.approx(alone[-1]["eval"]["loss"], rel=1e-10)


@pytest.mark.mpi
def test_an_evaluation_leaves_every_module_in_its_own_mode(comm):
    """Also a part that its builder put into evaluation mode; so weights do not depend on evaluations."""

    class PartlyFrozen(Mixing):
        def layers(self):
            return [lambda: MixRows().eval(), lambda: nn.Dropout(0.5), *super().layers()]

    weights = []
    for how in ({}, {"eval_every": 1}):
        _, trainer = lines_of(PartlyFrozen(), comm, steps=3, **how)
        modes = [layer.training for layer in trainer.executor.stage.layers]
        assert modes[0] is False and all(modes[1:])
        weights.append(trainer.executor.stage.named_parameters())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
