"""The profile: what is measured of which layers, the file that --stage-split takes, and one line for what cannot be."""

import json
from dataclasses import dataclass

import pytest
import torch

from hpctrain.config import Config
from hpctrain.model.layer_times import LayerTime
from hpctrain.tools import profile
from hpctrain.train.assignment import measured_costs
from hpctrain.train.facts import cpu_name
from tests.harness.launch import ROOT
from tests.train.toys import NUM_ROWS, Masked

TOYS, HERE = f"{ROOT}/tests/train/toys.py", f"{ROOT}/tests/tools/test_profile.py"


@dataclass
class Wrong(Masked):
    """Gives one thing that is not what it should be."""

    what: str = "layers"

    def layers(self):
        if self.what == "layers":
            return [torch.nn.Linear(2, 2)]
        return super().layers()[:-1] + [lambda: "no layer"] if self.what == "layer" else super().layers()

    def loss(self, outputs, targets):
        return super().loss(outputs, targets)[0]

    def dataset(self, split):
        return [3, 4] if self.what == "rows" else [] if self.what == "nothing" else super().dataset(split)


@pytest.fixture(autouse=True)
def threads_kept(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(profile, "SECONDS", 0.05)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def measure(tmp_path):
    """What the file of a profile with these flags holds."""

    def run(*flags, task="Masked"):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        assert profile.run([str(out), "--task", f"{TOYS}:{task}", *flags], None) == 0
        return json.loads(out.read_text())

    return run


def test_the_file_has_the_seconds_of_each_layer_and_what_they_are_of(measure, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = measure()
    assert list(found) == ["task", "rows", "threads", "cpu", "layers"]
    assert found["task"] == f"{TOYS}:Masked" and found["cpu"] == cpu_name()
    assert found["threads"] == 1 and torch.get_num_threads() == 1
    assert len(found["layers"]) == 3
    assert all(set(layer) == {"forward", "backward"} and min(layer.values()) > 0 for layer in found["layers"])


def test_stage_split_reads_what_was_measured(tmp_path):
    out = tmp_path / "costs.json"
    assert profile.run([str(out), "--task", f"{TOYS}:Deep"], None) == 0
    layers = json.loads(out.read_text())["layers"]
    assert measured_costs(str(out), 16) == [layer["forward"] + layer["backward"] for layer in layers]
    with pytest.raises(ValueError, match="it has 16 layers, the model 15; profile it again"):
        measured_costs(str(out), 15)


@pytest.mark.parametrize(
    "flags, rows",
    [
        ("--batch-size 24", 24),
        ("--batch-size 24 --stages 3", 2),
        ("--batch-size 24 --stages 3 --num-microbatches 5", 5),
        ("--batch-size 24 --stages 3 --micro-batch-size 7", 7),
        ("--batch-size 24 --stages 2 --schedule 1f1b-interleaved --num-microbatches 6", 4),
        ("--batch-size 100", NUM_ROWS),
    ],
)
def test_rows_are_those_of_a_micro_batch_as_training_would_have_it(measure, flags, rows):
    assert measure(*flags.split())["rows"] == rows


def test_threads_are_as_said_else_as_the_environment_says_else_one(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert profile.threads_of(Config(threads=2)) == 2 and profile.threads_of(Config()) == 3
    for nothing in ("", "0", "2,1"):
        monkeypatch.setenv("OMP_NUM_THREADS", nothing)
        assert profile.threads_of(Config()) == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert profile.threads_of(Config()) == 1


def test_torch_gets_the_threads_asked_for(measure):
    assert measure("--threads", "2")["threads"] == 2 and torch.get_num_threads() == 2


@pytest.mark.parametrize("flags", ["--precision float64", "--precision bf16-mixed", "--task-option dropout=0.5"])
def test_precision_and_options_of_the_task_are_those_of_training(measure, flags):
    assert len(measure(*flags.split())["layers"]) == 3


def test_a_slower_layer_has_the_larger_share(tmp_path, monkeypatch, capsys):
    times = [LayerTime(0.001, 0.002), LayerTime(0.004, 0.005)]
    monkeypatch.setattr(profile, "measured", lambda *_: times)
    out = tmp_path / "costs.json"
    assert profile.run([str(out), "--task", f"{TOYS}:Masked", "--stages", "2", "--threads", "4"], None) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Masked: micro-batches of 4 rows, 4 threads",
        "layer  forward ms  backward ms   share",
        "    0       1.000        2.000  25.0 %",
        "    1       4.000        5.000  75.0 %",
        f"to share the layers out by these seconds: --stage-split {out}",
    ]
    assert measured_costs(str(out), 2) == pytest.approx([0.003, 0.009])


def test_repeats_fill_the_time_within_bounds(monkeypatch):
    monkeypatch.setattr(profile, "SECONDS", 5.0)
    for seconds, repeats in ((0.0, 100), (1e-5, 100), (0.25, 10), (2.0, 3)):
        assert profile.repeats_within([LayerTime(seconds, seconds)]) == repeats


@pytest.mark.parametrize(
    "argv, what",
    [
        ([], "profile: name the file to write first, as in: profile COSTS.json --task text"),
        (["--task", "text"], "profile: name the file to write first"),
        (["HERE/there.json"], "HERE/there.json: exists already; name a new file"),
        (["HERE/link.json"], "HERE/link.json: exists already; name a new file"),
        (["HERE/no/where.json"], "HERE/no/where.json: no such folder"),
        (["HERE/x.json", "--stagse", "2"], "--stagse: no such flag; did you mean --stages?"),
        (["HERE/x.json", "y.json"], "y.json: no such flag"),
        (["HERE/x.json", "--task", "nothing"], "--task nothing: there is no such task"),
        (
            ["HERE/x.json", "--task", f"{TOYS}:AsModule"],
            f"--task {TOYS}:AsModule: has a module(), which is one piece; only layers() can be shared out",
        ),
        (["HERE/x.json", "--task", f"{HERE}:Wrong"], "--task: layers() gave a Linear; it should give a list of"),
        (["HERE/x.json", "--task", f"{HERE}:Wrong", "--task-option", "what=layer"], "--task: layers.2 is a str; it sh"),
        (["HERE/x.json", "--task", f"{HERE}:Wrong", "--task-option", "what=loss"], "--task: loss() gave a tensor of s"),
        (["HERE/x.json", "--task", f"{HERE}:Wrong", "--task-option", "what=rows"], "--task: row 0 of dataset() is a i"),
        (
            ["HERE/x.json", "--task", f"{HERE}:Wrong", "--task-option", "what=nothing"],
            '--task: dataset("train") has no rows',
        ),
        (
            ["HERE/x.json", "--schedule", "1f1b-interleaved", "--stages", "2", "--num-microbatches", "3"],
            "--num-microbatches 3: --schedule 1f1b-interleaved takes multiples of --stages, such as 2 or 4",
        ),
    ],
)
def test_what_cannot_be_profiled_is_told_in_one_line(tmp_path, capsys, argv, what):
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "link.json").symlink_to("nowhere")
    assert profile.run([word.replace("HERE", str(tmp_path)) for word in argv], None) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"hpctrain: {what.replace('HERE', str(tmp_path))}") and err.count("\n") == 1
    assert (tmp_path / "there.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "there.json"]


def test_a_file_that_came_while_it_measured_is_left_alone(tmp_path, monkeypatch, capsys):
    out = tmp_path / "costs.json"
    monkeypatch.setattr(profile, "measured", lambda *_: out.write_text("mine") and [])
    assert profile.run([str(out), "--task", f"{TOYS}:Masked"], None) == 2
    assert capsys.readouterr().err == f"hpctrain: {out}: exists already; name a new file\n"
    assert out.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.mpi(min_size=2)
def test_one_rank_measures_and_all_return_the_same(shared_tmp_path, capsys):
    from mpi4py.MPI import COMM_WORLD as comm

    argv = [str(shared_tmp_path / "costs.json"), "--task", f"{TOYS}:Masked"]
    assert profile.run(argv, comm) == 0
    assert bool(capsys.readouterr().out) == (comm.rank == 0)
    assert len(measured_costs(argv[0], 3)) == 3
    assert profile.run(argv, comm) == 2
    assert bool(capsys.readouterr().err) == (comm.rank == 0)
