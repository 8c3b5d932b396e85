"""Runs that end and go on: the same bits as a run that never ended, whatever ended it, or a line that says why not."""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from hpctrain.config import Config
from hpctrain.train import checkpoint_files as files
from hpctrain.train import command, resume, run_folder
from hpctrain.train.checkpoint_pieces import opened
from hpctrain.train.executor import Executor
from hpctrain.train.shard import Shard
from tests.harness.launch import ROOT

TOYS = f"{ROOT}/tests/train/toys.py"
MASKED = ("--task", f"{TOYS}:Masked", "--task-option", "dropout=0.3", "--precision", "float64", "--batch-size", "13")
SCHEDULE = ("--lr", "0.02", "--lr-schedule", "cosine", "--lr-warmup-steps", "3")
RECOMMENDER = (
    "--task",
    f"{ROOT}/tests/train/recommender.py:Recommender",
    "--precision",
    "float64",
    "--batch-size",
    "9",
)


@pytest.fixture
def start(comm, monkeypatch, shared_tmp_path):
    """`start(name, *flags)` trains in the folder of that name, on all ranks; returns the exit code."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)

    def run(name, *flags):
        where = [] if name is None else ["--run-dir", str(shared_tmp_path / name)]
        return command.run([*where, "--threads", "1", *flags], comm)

    return run


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def losses(folder):
    """By step, as the lines of metrics.jsonl have them; each step is there once."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.mpi
@pytest.mark.wide_if(case=lambda flags: "2bw" in flags or "powersgd:1" in flags)
@pytest.mark.parametrize(
    "flags",
    [
        (*MASKED, *SCHEDULE, "--optimizer", "adam"),
        (*MASKED, "--optimizer", "momentum", "--stages", "2", "--num-microbatches", "3"),
        (*MASKED, *SCHEDULE, "--shard-optimizer"),
        (*MASKED, "--stages", "2", "--schedule", "1f1b-async", "--optimizer", "sgd"),
        (*MASKED, "--stages", "2", "--schedule", "2bw", "--optimizer", "adagrad", "--num-microbatches", "2"),
        (*MASKED, "--compress", "topk:0.2"),
        (*MASKED, "--optimizer", "adam", "--checkpoint-async"),
        (*MASKED, "--compress", "powersgd:1"),
        (*RECOMMENDER, "--batch-size", "9", "--optimizer", "adagrad", "--lr", "0.1"),
        ("--task", f"{TOYS}:Mixing", "--batch-size", "12", "--steps", "9"),
        ("--task", f"{TOYS}:Tied", "--stages", "2", "--batch-size", "12"),
    ],
    ids=lambda flags: " ".join(flags).replace(str(ROOT), ""),
)
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_ended(comm, start, shared_tmp_path, flags):
    """Saved in the middle of an epoch; data, schedule of rates, dropout and the optimizer's state go on."""
    if "--stages" in flags and comm.size % 2:
        pytest.skip("2 stages need an even number of ranks")
    how = ("--steps", "9", "--eval-every", "3", "--checkpoint-every", "4", "--keep-checkpoints", "3", *flags)
    assert start("whole", *how) == 0
    saved = shared_tmp_path / "whole" / "checkpoints" / "step-000004"
    assert start("second", "--resume", str(saved), *flags[:2]) == 0
    if comm.rank == 0:
        whole, second = (shared_tmp_path / name for name in ("whole", "second"))
        assert losses(second) == {step: loss for step, loss in losses(whole).items() if step > 4}
        assert min(losses(second)) == 5
        was, now = summary(whole), summary(second)
        assert now["resumed_from"] == 4 and was["resumed_from"] is None and was["checkpoints"]["saved"] == 3
        same = ("weights_sha256", "steps", "first_loss", "final_loss", "eval", "layout")
        assert {name: now[name] for name in same} == {name: was[name] for name in same}


@pytest.mark.mpi
def test_auto_takes_the_newest_whole_checkpoint_and_says_so(comm, start, shared_tmp_path, capsys):
    how = (*MASKED, "--steps", "8", "--checkpoint-every", "2", "--keep-checkpoints", "3", "--resume", "auto")
    folder = shared_tmp_path / "run"
    assert start("run", *how) == 0
    assert (f"no checkpoint in {folder}, so the run begins" in capsys.readouterr().err) == (comm.rank == 0)
    if comm.rank == 0:
        was, before = summary(folder), losses(folder)
        (folder / "summary.json").unlink()
        damaged = folder / "checkpoints" / "step-000008" / "rank-0000.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (folder / "checkpoints" / "step-000006" / "manifest.json").unlink()
    comm.barrier()
    assert start("run", *how) == 0
    told = capsys.readouterr()
    if comm.rank == 0:
        assert f"{damaged}: " in told.err and "step-000006" in told.err
        assert f"goes on from step 4, saved in {folder}/checkpoints/step-000004" in told.out
        assert summary(folder)["weights_sha256"] == was["weights_sha256"]
        assert losses(folder) == before and len(before) == 8
        assert [path.name for path in files.newest_first(folder / "checkpoints")][0] == "step-000008"
    comm.barrier()
    if comm.rank == 0:
        for manifest in folder.glob("checkpoints/step-*/manifest.json"):
            manifest.write_text("{}")
    comm.barrier()
    assert start("run", *how) == 2, "never a silent start from nothing"
    told = capsys.readouterr().err
    assert ("hpctrain: --resume: no whole checkpoint: " in told and "(and 2 more)" in told) == (comm.rank == 0)
    assert (folder / "metrics.jsonl").exists()


@pytest.mark.mpi
def test_a_run_that_is_done_is_left_alone_and_one_that_goes_back_sets_aside(comm, start, shared_tmp_path, capsys):
    how = (*MASKED, "--checkpoint-every", "2", "--keep-checkpoints", "3", "--eval-every", "2", "--resume", "auto")
    folder = shared_tmp_path / "run"
    assert start("run", *how, "--steps", "6", "--early-stop", "loss:9") == 0
    comm.barrier()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    assert start("run", *how) == 0
    assert ("nothing is left to train: " in capsys.readouterr().out) == (comm.rank == 0)
    assert start("run", *how, "--early-stop", "typo:3", "--steps", "8") == 2
    comm.barrier()
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    comm.barrier()
    if comm.rank == 0:
        (folder / "checkpoints" / "step-000006" / "manifest.json").unlink()
    comm.barrier()
    assert start("run", *how, "--steps", "8", "--early-stop", "none") == 0
    if comm.rank == 0:
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names == ["latest", "step-000004", "step-000006", "step-000006.skipped", "step-000008"]
        assert summary(folder)["steps"] == len(losses(folder)) == 8


@pytest.mark.mpi
def test_two_runs_are_never_in_one_folder(comm, start, shared_tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "WAIT_SECONDS", 0)
    how = (*MASKED, "--steps", "2", "--checkpoint-every", "1", "--resume", "auto")
    assert start("run", *how) == 0
    with run_folder.alone_in(shared_tmp_path / "run" if comm.rank == 0 else None):
        comm.barrier()
        assert start("run", *how, "--steps", "4") == 2
        line = f"hpctrain: --run-dir {shared_tmp_path / 'run'}: another run is in it"
        assert (line in capsys.readouterr().err) == (comm.rank == 0)
    comm.barrier()
    assert start("run", *how, "--steps", "4") == 0


@pytest.mark.mpi
def test_code_that_a_checkpoint_names_runs_only_where_the_command_line_names_it_too(
    comm, start, shared_tmp_path, capsys
):
    assert start("first", *MASKED, "--steps", "2", "--checkpoint-every", "2") == 0
    saved = shared_tmp_path / "first" / "checkpoints" / "step-000002"
    capsys.readouterr()
    assert start("second", "--resume", str(saved), "--steps", "4") == 2
    line = f"hpctrain: --resume {saved}: was saved with --task {TOYS}:Masked, whose code runs only where that is given"
    assert (line in capsys.readouterr().err) == (comm.rank == 0)
    assert start("third", "--resume", str(saved), "--steps", "4", "--seed", "1", *MASKED[:2]) == 2
    assert ("leave --seed out, or add --allow-change seed" in capsys.readouterr().err) == (comm.rank == 0)
    assert (
        start("fourth", "--resume", str(saved), "--steps", "4", "--seed", "1", *MASKED[:2], "--allow-change", "seed")
        == 0
    )


MANIFEST = {
    "step": 4,
    "state": {"step": 4, "rows": 52},
    "layout": {"stages": 4, "replicas": 1, "servers": 0},
    "config": asdict(
        Config(stages=4, stage_split="1,2,2,1", num_microbatches=8, shard_optimizer=True, schedule="zb-h1", threads=2)
    ),
}
SERVED = MANIFEST | {
    "layout": {"stages": 1, "replicas": 3, "servers": 1},
    "config": asdict(Config(servers=1, staleness=3, lr=0.5)),
}


@pytest.mark.parametrize(
    "manifest, argv, ranks, kept, left",
    [
        (MANIFEST, [], 4, {"stages": 4, "stage_split": "1,2,2,1", "num_microbatches": 8, "threads": 2}, {}),
        (MANIFEST, ["--stages", "2"], 4, {"schedule": "zb-h1"}, {"stage_split": "flops", "num_microbatches": None}),
        (
            MANIFEST,
            ["--servers", "1", "--schedule", "1f1b"],
            4,
            {"servers": 1},
            {"stages": 1, "shard_optimizer": False},
        ),
        (SERVED, [], 4, {"servers": 1, "staleness": 3}, {}),
        (SERVED, ["--servers", "0"], 3, {"lr": 0.5}, {"staleness": 0}),
        (SERVED, ["--stages", "2"], 4, {"lr": 0.5, "stages": 2}, {"servers": 0, "staleness": 0}),
    ],
)
def test_what_nobody_gives_stays_unless_it_was_chosen_for_another_layout(manifest, argv, ranks, kept, left):
    begun = resume.Start(Path("run"), Path("run/checkpoints/step-000004"), manifest)
    config, _ = resume.parse_resumed(argv, begun, ranks)
    assert {name: getattr(config, name) for name in {**kept, **left}} == {**kept, **left}


@pytest.mark.mpi
def test_another_optimizer_of_tables_leaves_that_of_the_rest(comm, start, shared_tmp_path, capsys):
    how = (*RECOMMENDER, "--batch-size", "9", "--optimizer", "adam", "--lr", "0.01")
    assert start("first", *how, "--steps", "3", "--checkpoint-every", "3") == 0
    saved = ("--resume", str(shared_tmp_path / "first" / "checkpoints" / "step-000003"), *RECOMMENDER[:2])
    capsys.readouterr()
    assert start("second", *saved, "--steps", "6", "--table-optimizer", "sgd") == 2
    assert ("--table-optimizer" in capsys.readouterr().err) == (comm.rank == 0)
    other = ("--table-optimizer", "sgd", "--allow-change", "table-optimizer")
    assert start("second", *saved, "--steps", "6", *other) == 0
    assert ("what the optimizer keeps begins anew: tables\n" in capsys.readouterr().err) == (comm.rank == 0)
    if comm.rank == 0:
        kept = opened(shared_tmp_path / "second" / "checkpoints" / "step-000006")
        assert {float(kept[key]) for key in kept if key.endswith("/step")} == {6.0}


@pytest.mark.mpi
def test_other_rates_rows_and_lengths_are_told_and_taken(comm, start, shared_tmp_path, capsys):
    """11 steps of 13 rows, then 4 of 20: each epoch has every row of the 37 once, whatever the batches."""
    assert start("first", *MASKED, "--steps", "4", "--checkpoint-every", "4") == 0
    saved = shared_tmp_path / "first" / "checkpoints" / "step-000004"
    capsys.readouterr()
    assert (
        start("second", *MASKED[:2], "--resume", str(saved), "--batch-size", "20", "--steps", "7", "--lr", "0.5") == 0
    )
    told = capsys.readouterr().err
    if comm.rank == 0:
        for line in ("--global-batch-size was 13, from here on 20", "--steps was 4, from here on 7", "--lr was 0.003"):
            assert f"note: --resume: {line}" in told
        assert len(losses(shared_tmp_path / "second")) == 3


SIGNALLED = [
    (signal.SIGUSR1, (), 3),
    (signal.SIGTERM, ("--stages", "2"), 3),
    (signal.SIGINT, ("--servers", "1"), 3 + 2),
    (signal.SIGUSR1, ("--stages", "2", "--schedule", "1f1b-async"), 3 + 2),
    (signal.SIGTERM, ("--stages", "2", "--schedule", "2bw", "--num-microbatches", "3"), 3 + 2),
    (signal.SIGUSR1, ("--servers", "1", "--staleness", "2", "--delay", "1"), 3 + 5),
    (signal.SIGUSR1, ("--servers", "1", "--staleness", "1", "--delay-window", "2"), 3 + 5),
    (signal.SIGINT, ("--servers", "1", "--staleness", "inf"), 3 + 64),
    (signal.SIGUSR1, (*RECOMMENDER, "--servers", "2", "--staleness", "1"), 3 + 3),
]


@pytest.mark.mpi(min_size=3)
@pytest.mark.wide_if(case=lambda flags, **_: "2bw" in flags or "--delay" in flags or "--delay-window" in flags)
@pytest.mark.parametrize("number, flags, last", SIGNALLED, ids=lambda value: str(value).replace(str(ROOT), ""))
def test_a_signal_on_one_rank_has_all_save_and_leave(
    comm, start, shared_tmp_path, monkeypatch, capsys, number, flags, last
):
    """Twice, as step 3 begins. Where a step ends with all ranks, the run that goes on has the bits of one without."""
    if "--stages" in flags and comm.size % 2:
        pytest.skip("2 stages need an even number of ranks")
    task = () if "--task" in flags else MASKED
    how = (*task, "--batch-size", "13", "--steps", "70", "--checkpoint-every", "100", *flags)
    begin, rank = Executor._begin_step, 0 if "--servers" in flags else comm.size - 1

    def begins(self, step):
        if step == 2 and comm.rank == rank:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        begin(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(Executor, "_begin_step", begins)
        before = signal.getsignal(number)
        code = start("run", *how)
        assert signal.getsignal(number) is before
    folder = shared_tmp_path / "run"
    assert code == 75
    assert ("asked to stop: saved in" in capsys.readouterr().err) == (comm.rank == 0)
    if comm.rank == 0:
        assert not (folder / "summary.json").exists()
        assert [path.name for path in files.newest_first(folder / "checkpoints")] == [files.name_of(last)]
    assert start("run", "--resume", "auto") == 0
    whole = shared_tmp_path / "whole"
    assert start("whole", *how) == 0
    if comm.rank == 0:
        assert summary(folder)["steps"] == len(losses(folder)) == 70
        if "1f1b-async" not in flags and "2bw" not in flags and "--staleness" not in flags:
            assert summary(folder)["weights_sha256"] == summary(whole)["weights_sha256"]
            assert losses(folder) == losses(whole)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "flags", [MASKED, (*RECOMMENDER, "--staleness", "1", "--batch-size", "9")], ids=["dense", "rows"]
)
def test_a_signal_that_a_server_alone_gets_is_heard_by_all(comm, start, shared_tmp_path, monkeypatch, flags):
    """It tells the workers with its answers."""
    finish = Shard.finish

    def finishes(self, worker, clock, *args, **kwargs):
        if clock == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        finish(self, worker, clock, *args, **kwargs)

    monkeypatch.setattr(Shard, "finish", finishes)
    assert start("run", *flags, "--servers", "1", "--steps", "70") == 75
    if comm.rank == 0:
        (saved,) = files.newest_first(shared_tmp_path / "run" / "checkpoints")
        assert 4 <= files.read_manifest(saved)["step"] < 20


@pytest.mark.mpi(min_size=3)
@pytest.mark.wide_if(case=lambda servers, flags: (servers == "1") == ("--update" in flags or "--dense-via" in flags))
@pytest.mark.parametrize("servers", ["1", "2"])
@pytest.mark.parametrize(
    "flags",
    [
        (*RECOMMENDER, "--batch-size", "9", "--optimizer", "adam", "--lr", "0.01"),
        (*RECOMMENDER, "--batch-size", "9", "--update", "worker", "--optimizer", "adagrad", "--table-optimizer", "sgd"),
        (*RECOMMENDER, "--batch-size", "9", "--dense-via", "ring", "--optimizer", "momentum", "--lr", "0.01"),
        (*MASKED, "--optimizer", "adamw", "--checkpoint-async"),
    ],
    ids=lambda flags: " ".join(flags).replace(str(ROOT), ""),
)
def test_workers_and_servers_go_on_with_the_same_bits(comm, start, shared_tmp_path, servers, flags):
    """Of what servers hold: dense optimizer states, which a border between two may cut, and rows with theirs."""
    how = ("--steps", "9", "--checkpoint-every", "4", "--keep-checkpoints", "3", "--servers", servers, *flags)
    assert start("whole", *how) == 0
    saved = shared_tmp_path / "whole" / "checkpoints" / "step-000004"
    assert start("second", "--resume", str(saved), *flags[:2]) == 0
    if comm.rank == 0:
        whole, second = (shared_tmp_path / name for name in ("whole", "second"))
        assert losses(second) == {step: loss for step, loss in losses(whole).items() if step > 4}
        was, now = summary(whole), summary(second)
        same = ("weights_sha256", "final_loss", "eval", "layout")
        assert {name: now[name] for name in same} == {name: was[name] for name in same}
