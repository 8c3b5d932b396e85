"""What a run takes of a tuning: the file, flags that win over it, values that repeat the run without it."""

import json
import os
import re
import sys
from dataclasses import asdict
from unittest.mock import patch

import numpy as np
import pytest
import torch

from hpctrain import DataParallel, Mesh, Pipeline, cli
from hpctrain.comm import nodes
from hpctrain.config import Config, UsageError, parse, to_toml
from hpctrain.plan.allreduce import BUILT_IN, Constants
from hpctrain.plan.tuning import Tuning
from hpctrain.train import command
from hpctrain.train.tuned import tuned
from tests.harness.launch import ROOT
from tests.plan.test_tuning import WHOLE

MASKED, DEEP = f"{ROOT}/tests/train/toys.py:Masked", f"{ROOT}/tests/train/toys.py:Deep"
MEASURED = Constants(2.5e-5, 1.25e-10, 65536, 1048576)
DOUBLES = {"latency": 60, "seconds_per_byte": 1e-15, "largest_doubled": 1 << 30, "largest_staged": 0}
RINGS = {"latency": 1e-9, "seconds_per_byte": 1e-3, "largest_doubled": 0, "largest_staged": 1 << 50}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tuning.json").write_text(json.dumps(WHOLE))
    return str(tmp_path / "tuning.json")


def taken(*argv) -> tuple[Config, Tuning]:
    return tuned(*parse(list(argv)))


def test_values_take_the_place_of_the_name(path):
    config, tuning = taken("--tuning", path)
    assert config.tuning == asdict(MEASURED) and config.bucket_bytes == 4194304
    assert tuning.constants == MEASURED and tuning.place.ranks == 4
    assert taken() == (Config(), Tuning())


def test_what_is_written_repeats_the_run_when_the_file_is_gone(path, tmp_path):
    config, _ = taken("--tuning", path)
    (tmp_path / "config.toml").write_text(to_toml(config))
    os.remove(path)
    again, tuning = taken("--config", str(tmp_path / "config.toml"))
    assert again == config and tuning == Tuning(MEASURED)
    plain, tuning = taken("--config", str(tmp_path / "config.toml"), "--tuning", "none")
    assert plain.tuning is None and tuning == Tuning()


@pytest.mark.parametrize(
    "file, flags, wanted",
    [
        ("", ["--tuning", "HERE"], 4194304),
        ("", ["--tuning", "HERE", "--bucket-bytes", "5"], 5),
        ("bucket_bytes = 7", ["--tuning", "HERE"], 4194304),  # flags win over the file
        ("tuning = 'HERE'", [], 4194304),
        ("tuning = 'HERE'\nbucket-bytes = 7", [], 7),
        ("tuning = 'HERE'\nbucket_bytes = 1048576", [], 1048576),
        ("tuning = 'HERE'\nbucket_bytes = 7", ["--bucket-bytes", "5"], 5),
        ("tuning = 'nowhere'\nbucket_bytes = 7", ["--tuning", "HERE"], 4194304),
        ("tuning = 'nowhere'", ["--tuning", "none"], 1 << 20),
    ],
)
def test_the_size_of_buckets_is_that_of_what_was_said_last(path, tmp_path, file, flags, wanted):
    (tmp_path / "run.toml").write_text(file.replace("HERE", path))
    argv = ["--config", str(tmp_path / "run.toml"), *(flag.replace("HERE", path) for flag in flags)]
    assert taken(*argv)[0].bucket_bytes == wanted


@pytest.mark.parametrize(
    "text, line",
    [
        ("[tuning]\nlatency = -1.0", "tuning: seconds_per_byte: missing"),
        ("tuning = 3", "tuning: expected text, got 3"),
        (
            "[tuning]\nlatency = 2020-01-01\nseconds_per_byte = 1e-9\nlargest_doubled = 1\nlargest_staged = 1",
            "latency is",
        ),
        ("[tuning]\nlatency = nan\nseconds_per_byte = 1e-9\nlargest_doubled = 1\nlargest_staged = 1", "latency is nan"),
        (
            "[tuning]\nlatency = 1\nseconds_per_byte = 1e-9\nlargest_doubled = 1\nlargest_staged = 1\nx = 2",
            "'x': no such",
        ),
    ],
)
def test_values_that_somebody_changed_are_looked_at(text, line, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(line)):
        parse(["--config", str(tmp_path / "run.toml")])


def test_servers_that_sum_up_themselves_refuse_it(path):
    with pytest.raises(UsageError, match="^--tuning: gradients go to the --servers; leave it out, or take --dense-via"):
        parse(["--tuning", path, "--servers", "1"])
    assert parse(["--tuning", path, "--servers", "1", "--dense-via", "ring"])[0].tuning == path


def prepared(tmp_path, *flags, num_ranks=4):
    return command.prepare(["--run-dir", str(tmp_path / "run"), *flags], num_ranks)


@pytest.mark.parametrize(
    "flags, num_ranks, note",
    [
        ([], 1, "--tuning has no effect: nothing is summed up where there is one replica"),
        (["--stages", "4"], 4, "--tuning has no effect: nothing is summed up where there is one replica"),
        (["--allreduce", "ring"], 4, ""),
        (
            ["--allreduce", "ring", "--bucket-bytes", "9"],
            4,
            "--tuning has no effect with --allreduce ring, but for a size of buckets",
        ),
        (
            ["--shard-optimizer", "--bucket-bytes", "9"],
            4,
            "--tuning has no effect with --shard-optimizer, but for a size of buckets",
        ),
        (["--bucket-bytes", "9"], 4, ""),
    ],
)
def test_a_file_without_effect_says_so(path, tmp_path, capsys, flags, num_ranks, note):
    assert "folder" in prepared(tmp_path, "--tuning", path, *flags, num_ranks=num_ranks)
    assert capsys.readouterr().err == (f"note: {note}\n" if note else "")


@pytest.mark.parametrize(
    "content, what",
    [
        (None, "No such file or directory; measure again: mpirun -n N python -m hpctrain tune --out FILE"),
        ("{", "not a whole file of JSON; measure again"),
        (json.dumps({**WHOLE, "format": 2}), "format 2 is newer than this hpctrain, which reads 1; measure again"),
        (json.dumps({**WHOLE, "latency": -1}), "latency is -1; expected seconds from 1e-09 to 60; measure again"),
    ],
)
def test_a_file_that_cannot_be_used_ends_before_anything_is_made(tmp_path, content, what):
    path = tmp_path / "tuning.json"
    if content is not None:
        path.write_text(content)
    usage = prepared(tmp_path, "--tuning", str(path))["usage"]
    assert usage.startswith(f"--tuning {path}: {what}") and "\n" not in usage
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi(min_size=2)
def test_a_run_goes_by_the_file_and_is_repeated_without_it(comm, monkeypatch, shared_tmp_path, capsys):
    """Each rank on a node of its own: then messages carry everything, by the way that the constants say."""
    monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank)
    path, found = shared_tmp_path / "tuning.json", {}
    for name, values in (("doubling", DOUBLES), ("ring", RINGS)):
        if comm.rank == 0:
            path.write_text(json.dumps({**WHOLE, **values, "bucket_bytes": 64}))
        found[name] = run(comm, shared_tmp_path / name, "--tuning", path)
        assert {each["algorithm"] for each in found[name]["allreduce"]} == {name}
        assert len(found[name]["allreduce"]) > 3, "buckets of 64 bytes"
        assert found[name]["tuning"] == {**values, "bucket_bytes": 64}
    note = "the tuning was measured on 4 ranks on 2 nodes, 2 on each, with MPICH 5.0.2"
    assert (note in capsys.readouterr().err) == (comm.rank == 0)
    if comm.rank == 0:
        path.unlink()
    again = run(comm, shared_tmp_path / "again", "--config", shared_tmp_path / "doubling" / "config.toml")
    assert again["weights_sha256"] == found["doubling"]["weights_sha256"]
    assert {each["algorithm"] for each in again["allreduce"]} == {
        "doubling"
    } and "tuning was" not in capsys.readouterr().err


@pytest.mark.mpi(min_size=2)
def test_on_one_node_no_file_changes_a_bit(comm, shared_tmp_path):
    """All with buckets of one size, which does."""
    found = []
    for number, values in enumerate((None, DOUBLES, RINGS)):
        path = shared_tmp_path / "tuning.json"
        if comm.rank == 0 and values:
            path.write_text(json.dumps({**WHOLE, **values}))
        tuning = ["--tuning", path] if values else []
        found.append(run(comm, shared_tmp_path / f"{number}", "--bucket-bytes", "256", *tuning)["weights_sha256"])
    assert found[0] == found[1] == found[2]


def run(comm, folder, *flags) -> dict:
    """The summary of a finished run, on all ranks."""
    given = ["--task", MASKED, "--steps", "3", "--batch-size", "9"] if "--config" not in flags else []
    with patch.dict(os.environ), patch("sys.stderr", sys.stderr):
        code = cli.main([*given, "--run-dir", str(folder), *map(str, flags)], comm)
    assert code == 0
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.mpi
@pytest.mark.parametrize("given, wanted", [({}, 2), ({"bucket_bytes": 1}, 4)])
def test_a_loop_of_ones_own_takes_buckets_of_the_mesh(comm, given, wanted):
    """Of 4 parameters, which take 64 bytes each; the tuning closes a bucket at two of them."""
    with Mesh(comm, tuning=Tuning(BUILT_IN, 65)) as mesh:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size)) for size in (2, 1, 1, 1)])
        wrapped = DataParallel(Summing(model), mesh, **given)
        wrapped(torch.ones(1)).backward()
        assert len(wrapped._gradients._flat.buckets) == wanted
        np.testing.assert_array_equal(model[0].grad.numpy(), np.ones(2))


@pytest.mark.mpi
def test_a_pipeline_of_ones_own_takes_them_too(comm):
    def built(**given):
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(4)]
        pipeline = Pipeline(
            layers,
            lambda outputs, targets: outputs.sum(),
            mesh,
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            **given,
        )
        return len(pipeline._executor.gradients.buckets)

    with Mesh(comm, tuning=Tuning(BUILT_IN, 300)) as mesh:
        assert built() == 2 and built(bucket_bytes=1) == 4, "a layer has 256 bytes"


class Summing(torch.nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.parameters_of_it = parameters

    def forward(self, inputs):
        return sum(each.sum() for each in self.parameters_of_it) * inputs.sum()
