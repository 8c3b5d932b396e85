"""Schedules without a flush equal a history of weights that is written down in one process, to 1e-12 in float64."""

import itertools

import pytest
import torch

from hpctrain.model.precision import Precision
from hpctrain.model.stage import build_stage
from hpctrain.plan import formulas
from hpctrain.plan.grid import split_evenly
from hpctrain.plan.program import program
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.train.batches import GlobalSampler
from hpctrain.train.optimizer import build_optimizer
from tests.oracles.delayed_weights import train
from tests.train.sharing import by_rank_0
from tests.train.test_equivalence import part_of
from tests.train.toys import Deep, run

STEPS, DRAIN, ROWS = 8, 3, 13
KINDS = [("1f1b-async", False), ("1f1b-async", True), ("2bw", False)]
GRIDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
OPTIMIZERS = {"sgd": 0.5, "adam": 0.01}


def expected(schedule, vertical_sync, stages, replicas, microbatches, optimizer, clip_norm):
    """Losses by step, and weights by name."""
    task, split = Deep(), [range(part.start, part.stop) for part in split_evenly(16, stages)]
    stage = build_stage(task.layers(), 0, Precision("float64"))
    data, sampler = task.dataset("train"), GlobalSampler(37, ROWS, 0)
    updates = []
    for number in range(STEPS):
        if number and number % DRAIN == 0:
            updates.append(None)
        rows = sampler.rows(number)
        pieces = [rows[piece.start : piece.stop] for piece in split_evenly(len(rows), replicas * microbatches)]
        batches = [
            [pieces[replica * microbatches + index] for replica in range(replicas)] for index in range(microbatches)
        ]
        each = batches if schedule == "1f1b-async" else [[piece for pieces in batches for piece in pieces]]
        updates += [[stacked(data, piece) for piece in pieces if len(piece)] for pieces in each]
    losses = train(
        stage.layers,
        [0, *(part.stop for part in split)],
        updates,
        task.loss,
        lambda parameters: build_optimizer(optimizer, parameters, OPTIMIZERS[optimizer], 0.9, 0.0),
        schedule=schedule,
        vertical_sync=vertical_sync,
        clip_norm=clip_norm,
    )
    together = microbatches if schedule == "1f1b-async" else 1
    steps = [losses[start : start + together] for start in range(0, len(losses), together)]
    means = [sum(value for value, _ in step) / max(1, sum(items for _, items in step)) for step in steps]
    return means, {name: each.detach() for name, each in stage.named_parameters().items()}


def stacked(data, rows):
    inputs, targets = zip(*(data[row] for row in rows))
    return torch.stack(inputs), torch.stack(targets)


def is_wide(stages, replicas, schedule, vertical_sync, optimizer) -> bool:
    """On 2 and 4 ranks each grid has each kind, with one optimizer or the other."""
    turn = GRIDS.index((stages, replicas)) + KINDS.index((schedule, vertical_sync))
    return not 1 < stages * replicas <= 4 or turn % 2 != list(OPTIMIZERS).index(optimizer)


@pytest.mark.mpi
@pytest.mark.wide_if(case=is_wide)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule, vertical_sync", KINDS)
@pytest.mark.parametrize("stages, replicas", GRIDS)
def test_asynchronous_training_equals_the_history(comm, stages, replicas, schedule, vertical_sync, optimizer):
    if stages * replicas > comm.size:
        pytest.skip(f"needs {stages * replicas} ranks")
    part = part_of(comm, stages * replicas)
    if part is None:
        return
    how = (max(3, stages), optimizer, None, True) if optimizer == "sgd" else (8, optimizer, 0.05, False)
    compare_to_history(part, schedule, vertical_sync, stages, replicas, *how)
    part.Free()


def compare_to_history(
    comm, schedule, vertical_sync, stages, replicas, microbatches, optimizer, clip_norm=None, recompute=False
):
    """Trains on all ranks of `comm`, and asserts losses, weights, versions and the list of what was done."""
    log: list = []
    losses, weights, executor = run(
        Deep(),
        comm,
        log,
        steps=STEPS,
        stages=stages,
        schedule=schedule,
        vertical_sync=vertical_sync,
        num_microbatches=microbatches,
        stage_split=",".join(str(len(piece)) for piece in split_evenly(16, stages)),
        global_batch_size=ROWS,
        optimizer=optimizer,
        lr=OPTIMIZERS[optimizer],
        clip_norm=clip_norm,
        recompute=recompute,
        eval_every=DRAIN,
    )
    how = schedule, vertical_sync, stages, replicas, microbatches, optimizer, clip_norm
    means, oracle = by_rank_0(comm, lambda: expected(*how))
    assert losses == pytest.approx(means, rel=1e-12, abs=0)
    for name, weight in oracle.items():
        largest = max(1.0, float(weight.abs().max()))
        assert (weights[name] - weight).abs().max() <= 1e-12 * largest, name
    check_log(log, executor, clip_norm, vertical_sync)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", ("1f1b", "1f1b-async", "2bw"))
def test_hooks_on_parameters_see_the_gradients_of_whatever_version(comm, schedule):
    """Here one that leaves nothing of the gradients of one matrix."""
    if (part := part_of(comm, 2)) is None:
        return

    class Masking(Deep):
        def layers(self):
            first, *rest = super().layers()

            def hooked():
                layer = first()
                layer.weight.register_hook(torch.zeros_like)
                return layer

            return [hooked, *rest]

    how = {"stages": 2, "num_microbatches": 4, "global_batch_size": 8, "schedule": schedule}
    before, after = (run(Masking(), part, steps=steps, **how)[1] for steps in (1, 5))
    assert torch.equal(before["layers.0.weight"], after["layers.0.weight"])
    assert not torch.equal(before["layers.1.0.weight"], after["layers.1.0.weight"])
    part.Free()


def check_log(log, executor, clip_norm, vertical_sync):
    """What was done is what the generator says; version and delay of each update are those of the formulas."""
    lengths = [DRAIN] * (STEPS // DRAIN) + [STEPS % DRAIN]
    wanted = [
        program(executor.name, executor.place._replace(num_updates=n), clips=clip_norm is not None) for n in lengths
    ]
    assert log == list(itertools.chain(*wanted))
    place, updates = executor.place, iter(executor.update.versions)
    each = 1 if SCHEDULES[executor.name].microbatch_updates else place.num_microbatches
    for length in lengths:
        for update in range(length * place.num_microbatches // each):
            used, made = next(updates)
            assert made == update
            assert used == formulas.version_used(executor.name, place, update * each, vertical_sync)
            if update >= place.num_stages:
                assert made - used == formulas.delay(executor.name, place, vertical_sync)
    assert next(updates, None) is None
    if lengths[0] * place.num_microbatches // each >= place.num_stages:
        assert executor.update.stash.peak == formulas.weight_versions(executor.name, place, vertical_sync)
