"""What a run that goes on tells of its settings, and what it says where there is nothing to go on from."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from hpctrain.comm.group import Group
from hpctrain.config import Config, UsageError
from hpctrain.plan.grid import Grid
from hpctrain.train import run_folder
from hpctrain.train.errors import AgreedError
from hpctrain.train.resume import Start, find
from hpctrain.train.run_folder import alone_in, make_run_folder
from hpctrain.train.same_run import changes

SAVED = Start(
    checkpoint=Path("run/checkpoints/step-000400"),
    manifest={
        "step": 400,
        "layout": {"stages": 1, "replicas": 8, "servers": 0},
        "config": asdict(Config(threads=1, num_microbatches=1)),
    },
)


@pytest.mark.parametrize(
    "config, grid, lines",
    [
        (Config(threads=1, num_microbatches=1, steps=401), Grid(1, 8), ["--steps was 400, from here on 401"]),
        (
            Config(stages=2, num_microbatches=8, steps=500, lr=0.5),
            Grid(2, 2),
            [
                "saved by 1 stage, 8 replicas; goes on with 2 stages, 2 replicas",
                "--num-microbatches was 1, from here on 8",
                "--steps was 400, from here on 500",
                "--lr was 0.003, from here on 0.5",
            ],
        ),
        (
            Config(servers=1, num_microbatches=1, steps=500),
            Grid(1, 3),
            [
                "saved by 1 stage, 8 replicas; goes on with 1 stage, 3 replicas, 1 server",
                "--steps was 400, from here on 500",
            ],
        ),
        (
            Config(threads=1, num_microbatches=1),
            Grid(1, 8),
            ["it was saved at step 400, so nothing is left to train; give more --steps"],
        ),
    ],
    ids=["steps", "another layout", "servers", "nothing left"],
)
def test_what_is_another_is_told_once(config, grid, lines):
    assert changes(SAVED, config, grid) == [f"--resume: {line}" for line in lines]


def said(*argv) -> str:
    """Why no checkpoint can be found."""
    with pytest.raises(AgreedError) as error:
        find(["--resume", *map(str, argv)], Group(None))
    return str(error.value)


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(tmp_path):
    run, root = tmp_path / "run", tmp_path / "run/checkpoints"
    hint = "no such folder; give auto, or a folder as step-000040"
    assert said(run) == f"--resume {run}: {hint}"
    assert said("atuo") == f"--resume atuo: {hint}"
    for step in ("000300", "000400"):
        (root / f"step-{step}").mkdir(parents=True)
    gone = root / "step-000100"
    assert said(gone) == f"--resume {gone}: no such folder; there is step-000400, step-000300"
    (run / "model.safetensors").write_text("")
    assert "no checkpoint is there; give auto, or a folder as" in said(run / "model.safetensors")


def test_the_folder_of_a_run_that_is_there_may_be_gone_on_in(tmp_path):
    with pytest.raises(UsageError) as error:
        make_run_folder(Config(run_dir=str(tmp_path)))
    assert str(error.value).endswith("exists already; name a new folder")
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UsageError) as error:
        make_run_folder(Config(run_dir=str(tmp_path)))
    assert str(error.value).endswith("exists already; name a new folder; --resume auto goes on with it")


def test_who_waits_for_another_run_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").write_text("")
    with ExitStack() as first:
        first.enter_context(alone_in(tmp_path))
        monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: first.close())
        with alone_in(tmp_path):
            line = f"note: --run-dir {tmp_path}: another run is in it; waits 60 s for its end\n"
            assert capsys.readouterr().err == line
