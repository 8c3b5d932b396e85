"""Ranks are killed and the others go on: the same training, as far as what is left can give it. Open MPI only."""

import json
import sys

import pytest

from tests.harness.launch import ROOT, launcher_env, mpirun, run, run_python
from tests.soak.job import Job, kill, losses, num_lines
from tests.soak.losses import MITIGATION

DYING, RECOMMENDER = (f"{ROOT}/tests/failing/dying.py:{name}" for name in ("Dying", "DyingRecommender"))
STEPS = 20
HOW = ("--precision", "float64", "--batch-size", "13", "--steps", STEPS, "--threads", "1", "--lr-schedule", "cosine")
CONTINUE = ("--on-rank-loss", "continue")


def train(task, *flags):
    return [sys.executable, "-m", "hpctrain", "--task", task, *map(str, (*HOW, *flags))]


def launch(ranks, task, *flags):
    command = [*mpirun(), *MITIGATION, "-n", str(ranks), *train(task, *CONTINUE, *flags)]
    return run(command, timeout=280, env=launcher_env())


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process, by task."""
    found = {}

    def losses_of(task):
        if task not in found:
            folder = tmp_path_factory.mktemp("alone") / "run"
            result = run_python(*train(task, "--run-dir", folder)[1:], timeout=200)
            assert result.returncode == 0, result
            found[task] = losses(folder)
        return found[task]

    return losses_of


def dead(deaths):
    return sorted(int(each.split(":")[0]) for each in deaths.split("+"))


@pytest.mark.parametrize(
    "task, ranks, deaths, flags",
    [
        (DYING, 4, "1:5+0:9", ("--checkpoint-every", "3", "--checkpoint-async", "--eval-every", "4")),
        (DYING, 4, "2:5+3:5", ("--on-nan", "skip", "--loader-workers", "1")),
        (DYING, 4, "0:5+1:7+2:9", ()),
        (DYING, 5, "1:5", ("--servers", "2")),
        (DYING, 4, "1:5+0:9", ("--servers", "1", "--update", "worker")),
        (RECOMMENDER, 3, "1:5", ()),
        (RECOMMENDER, 4, "0:5", ("--servers", "1")),
        (RECOMMENDER, 4, "1:5", ("--servers", "1", "--dense-via", "ring")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value).rpartition(":")[2],
)
def test_the_others_train_what_all_would_have_trained(alone, tmp_path, task, ranks, deaths, flags):
    """Nothing is lost but the step in which it happens, which is made again."""
    result = launch(ranks, task, "--task-option", f"deaths={deaths}", "--run-dir", tmp_path / "run", *flags)
    assert result.returncode == 0, result
    told, found = summary(tmp_path / "run"), losses(tmp_path / "run")
    assert told["done"] and sorted(told["lost_ranks"]) == dead(deaths), told["lost_ranks"]
    assert told["layout"]["ranks"] == ranks - len(dead(deaths))
    whole, dropped = dict(alone(task)), STEPS - len(found)
    assert found == sorted(found) and {step: whole[step] for step, _ in found} == pytest.approx(dict(found), rel=1e-9)
    assert dropped <= (len(dead(deaths)) if "--servers" in flags else 0), "rank 0 hears of rounds from a server"


@pytest.mark.parametrize(
    "ranks, deaths, flags",
    [
        (4, "1:5+3:7", ("--task-option", "in_backward=true", "--task-option", "mixes=true", "--compress", "topk:0.2")),
        (5, "1:5+0:9", ("--servers", "2", "--staleness", "2")),
        (5, "2:5+1:7", ("--servers", "1", "--staleness", "inf")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_depends_on_the_ranks_goes_on_too(tmp_path, ranks, deaths, flags):
    """Of workers that wait for nobody some steps are counted before a loss and after it, and a line may be missing."""
    how = ("--task-option", f"deaths={deaths}", "--steps", "60", "--lr", "0.02")
    result = launch(ranks, DYING, *how, "--run-dir", tmp_path / "run", *flags)
    assert result.returncode == 0, result
    told = summary(tmp_path / "run")
    assert told["done"] and sorted(told["lost_ranks"]) == dead(deaths) and told["steps"] == 60
    each = [loss for _, loss in losses(tmp_path / "run")]
    assert sum(each[-9:]) < sum(each[:9])


ACCOUNT, AGAIN = "1@hpctrain.train.trainer:Trainer._account:5", "hpctrain.train.survival:Survival"
SAVES = ("--checkpoint-every", "3", "--eval-every", "4")


@pytest.mark.parametrize(
    "ranks, places, flags",
    [
        (4, f"{ACCOUNT}+2@hpctrain.comm.mesh:duplicate:8", ()),
        (4, f"{ACCOUNT}+2@{AGAIN}._tell+3@{AGAIN}._who_knows:1:LOSS", ()),
        (3, "1@hpctrain.train.carry_out:Mesh", ()),
        (3, "0@hpctrain.train.trainer:Trainer._account:5", ()),
        (3, "1@hpctrain.train.checkpoint:Checkpoints._begin:7+0@hpctrain.train.evaluation:Evaluation.run:2", SAVES),
    ],
    ids=[
        "as others build again",
        "as some have heard",
        "before anything is built",
        "as others know of a step that is not noted",
        "evaluating and saving",
    ],
)
def test_whatever_the_ranks_are_in(alone, tmp_path, ranks, places, flags):
    """What follows the step that they go on from is made up for: its evaluation, its checkpoint."""
    run = tmp_path / "run"
    result = strike(ranks, places, "--run-dir", run, *flags)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result
    told, found = summary(run), losses(run)
    struck = dead(places.partition("+3@")[0].replace("@", ":"))
    assert told["done"] and sorted(told["lost_ranks"]) == struck, told["lost_ranks"]
    assert [step for step, _ in found] == [*range(1, STEPS + 1)]
    assert dict(found) == pytest.approx(dict(alone(DYING)), rel=1e-9)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    evaluated = {line["step"] for line in lines if "eval" in line}
    assert not flags or evaluated == {4, 8, 12, 16, 20} and (run / "checkpoints/step-000020").is_dir()


@pytest.mark.parametrize(
    "places, flags, code, line",
    [
        ("1@hpctrain.comm.abort:finalize", (), 0, "held-out"),
        ("1@hpctrain.train.command:find", (), 77, "another rank was lost"),
        (f"{ACCOUNT}+2@{AGAIN}._let_go:1:STOP", ("--stall-seconds", "3"), 76, "likely culprit: ranks 1, 2"),
    ],
    ids=["at the very end", "before the run", "one that is frozen as the others come together"],
)
def test_no_rank_is_left_waiting(tmp_path, places, flags, code, line):
    """Where ranks end the job after a loss, mpirun has given 0 once: whether a run is done stands in its summary."""
    result = strike(4, places, "--run-dir", tmp_path / "run", *flags)
    assert result.returncode in (code, 0) and "Traceback" not in result.stderr, result
    assert line in result.stdout + result.stderr, result
    assert (tmp_path / "run" / "summary.json").exists() == (code == 0)


def strike(ranks, places, *flags):
    command = train(DYING, *CONTINUE, *flags)
    command[2:3] = ["tests.failing.struck", places]
    return run([*mpirun(), *MITIGATION, "-n", str(ranks), *command], timeout=280, env=launcher_env())


def test_a_lost_server_ends_the_run_by_name(tmp_path):
    """It held what nobody else has; what was saved is there."""
    argv = train(DYING, *CONTINUE, "--servers", "1", "--steps", 100000, "--run-dir", tmp_path / "run")
    with Job(3, argv, tmp_path / "out", MITIGATION) as job:
        assert job.wait(lambda: num_lines(tmp_path / "run") > 3), job.told()
        kill(job.ranks()[2])
        job.gone(60)
    assert job.process.returncode == 77, job.told()
    assert "rank 2" in job.told() and "server" in job.told(), job.told()
