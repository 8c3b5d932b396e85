"""What any layout saved, any other takes over: the same weights and states, then the rest as if undisturbed."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from hpctrain.train import command
from hpctrain.train.checkpoint_pieces import opened
from hpctrain.train.checkpoint_slots import rows_of
from hpctrain.train.trainer import Trainer
from tests.harness.launch import ROOT
from tests.train.test_equivalence import part_of

LAYOUTS = {  # ranks, stages, servers
    "1x1": (1, 1, 0),
    "1x3": (3, 1, 0),
    "2x1": (2, 2, 0),
    "4x2": (8, 4, 0),
    "8x1": (8, 8, 0),
    "ps 1+3": (4, 1, 1),
    "ps 2+5": (7, 1, 2),
}
TASKS = {
    "deep": (f"{ROOT}/tests/train/toys.py:Deep", "adam"),
    "recommender": (f"{ROOT}/tests/train/recommender.py:Recommender", "adagrad"),
}
SAVED, STEPS = 5, 25
HOW = ("--precision", "float64", "--batch-size", "13", "--lr", "0.01", "--threads", "1", "--keep-checkpoints", "9")


def able(task: str, num_ranks: int = 8) -> list[str]:
    """Layouts for so many ranks; tables do not go with stages."""
    return [
        name for name, (ranks, stages, _) in LAYOUTS.items() if ranks <= num_ranks and (task == "deep" or stages == 1)
    ]


def train(comm, layout: str, *flags) -> None:
    """On as many ranks as the layout needs, the others go past."""
    num_ranks, stages, servers = LAYOUTS[layout]
    part = part_of(comm, num_ranks)
    if part is None:
        return
    assert command.run([*HOW, "--stages", str(stages), "--servers", str(servers), *flags], part) == 0
    part.Free()


def losses(folder) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def tensors_of(checkpoint) -> dict[str, torch.Tensor]:
    """Weights and all that optimizers keep, rows by ascending id, whoever held which of them."""
    saved = opened(checkpoint)
    found = {key: saved[key] for key in saved if key.startswith(("weights/", "optimizer/"))}
    for table in {key.split("/")[1] for key in saved if key.startswith("tables/")}:
        rows = rows_of(saved, table)
        order = rows["ids"].argsort()
        found |= {f"{table}/{slot}": values[order] for slot, values in rows.items()}
    return found


def check_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert torch.equal(values, second[name]), name


def check_near(first: dict, second: dict, bound: float) -> None:
    for name, values in first.items():
        largest = max(1.0, float(second[name].abs().max()))
        assert float((values - second[name]).abs().max()) <= bound * largest, name


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda before, **_: before not in ("1x3", "ps 1+3"))
@pytest.mark.parametrize("task, before", [(task, name) for task in TASKS for name in able(task)])
def test_every_layout_goes_on_from_what_another_saved(comm, shared_tmp_path, monkeypatch, capsys, task, before):
    """The rest of the run is that of one process, to 1e-10 (adagrad: 1e-8)."""
    if before not in able(task, comm.size):
        pytest.skip(f"{before} needs {LAYOUTS[before][0]} ranks")
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    folder, bound = shared_tmp_path, 1e-8 if task == "recommender" else 1e-10
    file, optimizer = TASKS[task]
    how = ("--task", file, "--optimizer", optimizer)
    train(comm, "1x1", *how, "--steps", str(STEPS), "--run-dir", str(folder / "whole"))
    train(comm, before, *how, "--steps", str(SAVED), "--checkpoint-every", "5", "--run-dir", str(folder / "saved"))
    comm.barrier()
    checkpoint = folder / "saved" / "checkpoints" / f"step-{SAVED:06d}"
    whole = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self: (self.checkpoints.save(self.state), whole(self)))
    for after in able(task, comm.size):
        second = folder / f"as {after}"
        train(comm, after, *how[:2], "--resume", str(checkpoint), "--steps", str(STEPS), "--run-dir", str(second))
        if comm.rank == 0:
            check_same(tensors_of(checkpoint), tensors_of(second / "checkpoints" / checkpoint.name))
            expected = {step: loss for step, loss in losses(folder / "whole").items() if step > SAVED}
            assert losses(second) == pytest.approx(expected, rel=bound)
            check_near(*(load_file(each / "model.safetensors") for each in (second, folder / "whole")), bound)
    capsys.readouterr()
