"""Flags and files: what is understood, and what is said where it is not. tests/cli holds the same under mpirun."""

import pytest

from hpctrain.config import Config, UsageError, early_stop_rule, parse, to_toml


def complaint(*argv) -> str:
    with pytest.raises(UsageError) as caught:
        parse(list(argv))
    return str(caught.value)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "run.toml").write_text("steps = 3\nlr = 1\nglobal-batch-size = 4\n")
    config, given = parse(["--config", str(tmp_path / "run.toml"), "--steps", "5"])
    assert (config.steps, config.lr, config.global_batch_size, config.seed) == (5, 1, 4, 0)
    assert given == {"steps"}, "what the command line gave"


def test_options_of_the_task_add_up(tmp_path):
    (tmp_path / "run.toml").write_text("[task_option]\nlayers = 3\nwidth = 8\ndeep = true\n")
    config, _ = parse(["--config", str(tmp_path / "run.toml"), "--task-option", "width=16", "--task-option", "heads=2"])
    assert config.task_option == {"layers": "3", "width": "16", "deep": "true", "heads": "2"}


def test_what_may_change_adds_up_however_it_is_given():
    both, _ = parse(["--resume", "a", "--allow-change", "task", "--allow-change", "task-option,data"])
    assert both.allow_change == "task,task-option,data"
    assert complaint("--resume", "a", "--allow-change", "lr") == (
        "--allow-change lr: expected of task, task-option, data, seed, optimizer, table-optimizer; all others may"
        " change anyway"
    )


def test_what_is_written_is_read_again(tmp_path):
    config, _ = parse(["--batch-size", "7", "--task-option", "layers=2", "--lr", "1e-7", "--data", 'a "b".txt'])
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert parse(["--config", str(tmp_path / "again.toml")])[0] == config


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--stepz", "3"], "--stepz: no such flag; did you mean --steps?"),
        (["--steps", "0"], "--steps: expected a whole number >= 1, got 0"),
        (["--steps", "many"], "--steps: expected a whole number >= 1, got 'many'"),
        (["--steps"], "--steps: expected one argument"),
        (["--ste", "3"], "--ste: no such flag; did you mean --steps?"),
        (["--lr", "nan"], "--lr: expected a number > 0 and < 3.4e+38, got nan"),
        (["--lr", "inf"], "--lr: expected a number > 0 and < 3.4e+38, got inf"),
        (["--lr", "1e39"], "--lr: expected a number > 0 and < 3.4e+38, got 1e+39"),
        (["--data", "bad\udcff.txt"], "--data: 'bad\\udcff.txt' is not UTF-8; give it another name"),
        (["--momentum", "1"], "--momentum: expected a number >= 0 and < 1, got 1.0"),
        (["--threads", "2.5"], "--threads: expected a whole number >= 1, got '2.5'"),
        (["--optimizer", "sgdd"], "--optimizer: expected one of sgd, momentum, adagrad, adam, adamw; got 'sgdd'"),
        (["--task-option", "layers"], "--task-option: expected KEY=VALUE, such as layers=4; got 'layers'"),
        (["--config", "nowhere.toml"], "--config nowhere.toml: No such file or directory"),
        (["extra"], "extra: no such flag; --help lists the flags"),
        (["--epochs", "2", "--steps", "3"], "--epochs: give it or --steps, not both"),
        (["--lr-min", "0.1"], "--lr-min 0.1: should be at most --lr 0.003"),
        (["--clip-norm", "0"], "--clip-norm: expected a number > 0, got 0.0"),
        (["--tensorboard", "yes"], "yes: no such flag; --help lists the flags"),
        (["--shard-optimizer", "--servers", "2"], "--shard-optimizer: leave --servers 2 out, they step"),
        (
            ["--shard-optimizer", "--allreduce", "doubling"],
            "--shard-optimizer: sums and weights go along the ring; leave --allreduce doubling out",
        ),
        (
            ["--servers", "1", "--allreduce", "ring"],
            "--allreduce ring: gradients go to the --servers; leave it out, or take --dense-via ring",
        ),
        (
            ["--servers", "1", "--compress", "bf16"],
            "--compress bf16: gradients go to the --servers; leave it out, or take --dense-via ring",
        ),
        *(
            (
                ["--compress", text],
                f"--compress {text}: expected none, bf16, topk:FRACTION or powersgd:RANK, such as topk:0.01",
            )
            for text in ("fp8", "bf16:1", "topk", "topk:0", "topk:1.1", "topk:1/0", "powersgd:0", "powersgd:1.5")
        ),
        (
            ["--reduce-dtype", "bfloat16", "--compress", "topk:0.1"],
            "--reduce-dtype bfloat16: --compress topk:0.1 says how gradients travel; give one",
        ),
        (
            ["--reduce-dtype", "float32", "--compress", "bf16"],
            "--reduce-dtype float32: --compress bf16 says how gradients travel; give one",
        ),
        (
            ["--reduce-dtype", "float32", "--precision", "float64"],
            "--reduce-dtype float32: gradients of --precision float64 travel as they are; leave it out",
        ),
        (
            ["--reduce-dtype", "bfloat16", "--servers", "1"],
            "--reduce-dtype bfloat16: gradients go to the --servers; leave it out, or take --dense-via ring",
        ),
        (
            ["--compress", "topk:0.1", "--shard-optimizer"],
            "--compress topk:0.1: each replica steps with the whole sum; leave --shard-optimizer out",
        ),
        (
            ["--compress", "powersgd:2", "--servers", "1", "--dense-via", "ring"],
            "--compress powersgd:2: each replica steps with the whole sum; leave --servers out",
        ),
        (
            ["--compress", "powersgd:2", "--schedule", "2bw"],
            "--compress powersgd:2: --schedule 2bw has no flush, at which all agree that a step was made; take 1f1b",
        ),
        (
            ["--compress", "topk:0.1", "--allreduce", "windows"],
            "--compress topk:0.1: what is sent goes along the ring; leave --allreduce windows out",
        ),
        *(
            (
                ["--shard-optimizer", "--schedule", name],
                f"--shard-optimizer: --schedule {name} has no flush, at which weights come together; take 1f1b",
            )
            for name in ("1f1b-async", "2bw")
        ),
        (["--early-stop", "loss:3"], "--early-stop loss:3: needs --eval-every N, the steps between evaluations"),
        *(
            (
                ["--eval-every", "1", "--early-stop", text],
                f"--early-stop {text}: expected METRIC:N or METRIC:N:max, such as loss:3",
            )
            for text in ("loss", "loss:0", "loss:x", ":3", "loss:3:up")
        ),
    ],
)
def test_a_mistake_is_one_line_with_what_would_work(argv, line):
    assert complaint(*argv) == line


@pytest.mark.parametrize(
    "text, line",
    [
        ("steps = 'many'", "steps: expected a whole number >= 1, got 'many'"),
        ("steps = 2.0", "steps: expected a whole number >= 1, got 2.0"),
        ("stepz = 3", "no setting is called 'stepz'; there is steps"),
        ("steps = = 3", "Invalid value (at line 1, column 9)"),
        ("tensorboard = 1", "tensorboard: expected true or false, got 1"),
        ("steps = true", "steps: expected a whole number >= 1, got True"),
        ("lr = true", "lr: expected a number > 0 and < 3.4e+38, got True"),
        ("task_option = 3", "task_option: expected KEY = VALUE pairs, got 3"),
        ("\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(text, line, tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("latin-1"))
    assert complaint("--config", str(path)) == f"--config {path}: {line}"


def test_values_are_checked_without_a_command_line_too():
    with pytest.raises(UsageError, match="--steps: expected a whole number >= 1, got -1"):
        Config(steps=-1)


def test_epochs_and_steps_of_the_command_line_win_over_either_of_the_file(tmp_path):
    (tmp_path / "steps.toml").write_text("steps = 3\n")
    (tmp_path / "epochs.toml").write_text("epochs = 2\n")
    steps, epochs = (["--config", str(tmp_path / name)] for name in ("steps.toml", "epochs.toml"))
    assert parse([*steps, "--epochs", "4"])[0].epochs == 4
    config, _ = parse([*epochs, "--steps", "7"])
    assert (config.steps, config.epochs) == (7, None)
    assert parse(epochs)[0].epochs == 2


@pytest.mark.parametrize(
    "text, rule",
    [
        ("loss:3", ("loss", 3, "min")),
        ("accuracy:1", ("accuracy", 1, "max")),
        ("brier_score:2", ("brier_score", 2, "min")),
        ("bits_per_byte:2:max", ("bits_per_byte", 2, "max")),
        ("top5_accuracy:2:min", ("top5_accuracy", 2, "min")),
    ],
)
def test_early_stop_knows_which_way_is_better(text, rule):
    assert early_stop_rule(text) == rule


def test_a_switch_is_false_unless_given(tmp_path):
    (tmp_path / "run.toml").write_text("tensorboard = true\n")
    assert not parse([])[0].tensorboard
    assert parse(["--tensorboard"])[0].tensorboard
    assert parse(["--config", str(tmp_path / "run.toml")])[0].tensorboard
    assert not parse(["--config", str(tmp_path / "run.toml"), "--no-tensorboard"])[0].tensorboard


def test_a_flag_takes_back_what_the_file_says(tmp_path):
    (tmp_path / "run.toml").write_text("clip_norm = 1.0\neval_every = 3\n")
    config, _ = parse(["--config", str(tmp_path / "run.toml"), "--clip-norm", "none"])
    assert (config.clip_norm, config.eval_every) == (None, 3)
    (tmp_path / "run.toml").write_text("pipeline_warmup = 2.0\nsteps = 3\n")
    config, _ = parse(["--config", str(tmp_path / "run.toml"), "--pipeline-warmup", "none", "--steps", "none"])
    assert (config.pipeline_warmup, config.steps) == (1.0, 400)
    assert complaint("--schedule", "none").startswith("--schedule: expected one of naive")
