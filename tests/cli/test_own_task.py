"""A task of the user's own by the command line: rows read ahead, evaluated, exported; and data that fail on the way."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpctrain import cli
from tests.cli.several import several
from tests.cli.test_train import MODULE, train, train_here
from tests.harness.launch import ROOT, run_mpi, run_python

TASK = ["--task", f"{ROOT}/tests/cli/noisy.py:Noisy"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two epochs on 2 ranks, with everything noted that can be."""
    folder = tmp_path_factory.mktemp("runs") / "noisy"
    flags = ["--epochs", "2", "--batch-size", "12", "--eval-every", "3", "--clip-norm", "1", "--tensorboard"]
    flags += ["--loader-workers", "1"]
    return folder, *train(2, folder, *TASK, *flags)


@pytest.fixture
def command(capsys):
    """Runs a command in this process: its exit code, standard output, standard error."""

    def run(*argv):
        code = cli.main([str(word) for word in argv], None)
        return code, *capsys.readouterr()

    return run


def test_it_runs_by_epochs_and_notes_what_was_asked_for(run):
    folder, summary, result = run
    assert result.stdout.startswith("Noisy: 2 ranks"), result
    assert "step 3/8  held-out loss " in result.stdout
    assert summary["steps"] == 8, "40 rows in batches of 12 make 4 steps an epoch"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval" in line] == [3, 6]
    steps = [line for line in lines if "eval" not in line]
    assert [line["items"] for line in steps] == [12, 12, 12, 4] * 2
    assert all(line["gradient_norm"] > 0 and 0 <= line["data_seconds"] < line["seconds"] for line in steps)
    assert summary["eval"]["loss"] > 0 and len(summary["data_waiting_share"]) == 2


def test_tensorboard_has_the_figures_of_metrics_jsonl(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _, _ = run
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curves = EventAccumulator(str(folder / "tensorboard")).Reload()
    for tag, key in (("train/loss", "loss"), ("train/learning_rate", "lr"), ("train/gradient_norm", "gradient_norm")):
        drawn = [(event.step, event.value) for event in curves.Scalars(tag)]
        assert drawn == [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in lines if "eval" not in line]
    drawn = [(event.step, event.value) for event in curves.Scalars("eval/loss")]
    assert drawn == [(line["step"], pytest.approx(line["eval"]["loss"], rel=1e-6)) for line in lines if "eval" in line]


def test_rows_read_ahead_by_any_number_of_processes_give_the_same_bits(run, tmp_path):
    """Also the random augmentation, which depends on seed, epoch and row alone."""
    folder, summary, _ = run
    alone, ahead = (
        train_here(tmp_path / f"by {workers}", "--config", folder / "config.toml", "--loader-workers", workers)
        for workers in (0, 2)
    )
    assert alone["weights_sha256"] == ahead["weights_sha256"]
    assert alone["final_loss"] == pytest.approx(summary["final_loss"], rel=1e-4)


def test_evaluate_gives_the_metrics_of_the_run_on_any_number_of_ranks(run, two, command):
    folder, summary, _ = run
    on_two = two["evaluate RUN"]
    for code, out, err in ((on_two.returncode, on_two.stdout, on_two.stderr), command("evaluate", folder)):
        assert code == 0, err
        first, metric = out.splitlines()
        assert first == f"9 rows (eval) of the task's own data, weights of {folder}"
        assert metric.startswith("loss ") and float(metric[5:]) == pytest.approx(summary["eval"]["loss"], rel=1e-4)
    _, every, _ = command("evaluate", folder, "--split", "all", "--batches", "2")
    assert every.startswith("24 of 49 rows (all)"), every


def test_export_writes_what_plain_torch_loads(run, command, tmp_path):
    folder, _, _ = run
    out = tmp_path / "out.safetensors"
    result = run_python(*MODULE, "export", folder, out, timeout=60)
    assert result.returncode == 0, result
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.load_state_dict(load_file(out))
    assert torch.equal(model[2].weight, load_file(folder / "model.safetensors")["layers.2.weight"])
    code, _, err = command("export", folder, out)
    assert (code, err) == (2, f"hpctrain: {out}: exists already; name a new file\n")


MISTAKES = {
    "evaluate": "the following arguments are required: RUN",
    "evaluate nowhere": "nowhere: no such folder; name that of a finished run, such as runs/text-",
    "export nowhere out": "nowhere: no such folder; name that of a finished run, such as runs/text-",
    "evaluate RUN --data x": "reads no data of your own; leave --data out",
    "evaluate RUN --batches many": "--batches: expected a whole number >= 1, got 'many'",
    "export RUN no/such/folder": "no/such/folder: no such folder",
}


@pytest.fixture(scope="module")
def two(run, tmp_path_factory):
    """What two ranks say to each mistake, and to none."""
    words = {argv: [run[0] if word == "RUN" else word for word in argv.split()] for argv in (*MISTAKES, "evaluate RUN")}
    return several(2, tmp_path_factory.mktemp("mistakes") / "all", words)


@pytest.mark.parametrize("argv", MISTAKES)
def test_a_mistake_is_one_line(two, argv):
    result, line = two[argv], MISTAKES[argv]
    told = [each for each in result.stderr.splitlines() if "hpctrain:" in each]
    assert result.returncode == 2 and len(told) == 1 and line in told[0], result


def test_weights_that_do_not_fit_the_task_are_told(run, command, tmp_path):
    folder, _, _ = run
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    code, _, err = command("evaluate", other)
    assert code == 2 and f"{weights}: damaged, or no safetensors file" in err, err
    save_file({"layers.0.weight": torch.ones(8, 3)}, weights)
    code, _, err = command("evaluate", other)
    assert code == 2 and "other weights than the task's: layers.0.bias (8,) is only in the model" in err, err


MISSING = "hpctrain: a row cannot be read: /no/such/row.png: No such file or directory"
BUG = "RuntimeError: row 5 is a bug of the task"


@pytest.mark.wide_if(case=lambda workers, fault, **_: (workers, fault) == (0, "missing"))
@pytest.mark.parametrize(
    "workers, fault, words, traceback",
    [(0, "missing", MISSING, False), (1, "missing", MISSING, False), (0, "raise", BUG, True)],
)
def test_data_that_fail_on_the_way_end_all_ranks_by_one_line(workers, fault, words, traceback, tmp_path):
    result = failing(tmp_path, fault, workers)
    assert result.returncode == 1 and words in result.stderr, result
    assert ("Traceback" in result.stderr) == traceback, result


def test_a_reading_process_that_is_killed_ends_all_ranks_by_one_line(tmp_path):
    result = failing(tmp_path, "killed", 1)
    assert result.returncode == 1 and "hpctrain: a process of --loader-workers was killed" in result.stderr, result
    assert "Traceback" not in result.stderr, result


@pytest.mark.wide_if(case=lambda fault, workers: workers == 0)  # tests/failing has more of these
@pytest.mark.parametrize("fault, workers", [("killed", 0), ("terminated", 1)])
def test_a_rank_that_is_killed_ends_all_and_leaves_no_reading_process(fault, workers, tmp_path):
    """The harness looks for what is left running."""
    assert failing(tmp_path, fault, workers).returncode not in (0, 1, 2)


@pytest.mark.wide_if(case=lambda fault, **_: fault == "raise")
@pytest.mark.parametrize("fault, code, words", [("raise", 1, ("Traceback", BUG)), ("terminated", 75, ("saved in",))])
def test_one_process_that_ends_by_force_leaves_no_reading_process(fault, code, words, tmp_path):
    result = failing(tmp_path, fault, 1, ranks=0)
    assert result.returncode == code and all(word in result.stderr for word in words), result


def failing(tmp_path, fault, workers, ranks=2):
    flags = ["--steps", "9", "--batch-size", "10", "--task-option", f"fault={fault}", "--loader-workers", workers]
    argv = [*MODULE, *TASK, *flags, "--run-dir", tmp_path / "run"]
    return run_mpi(ranks, [sys.executable, *argv], timeout=60) if ranks else run_python(*argv, timeout=60)
