"""tune: what is measured and in which order, the file that comes of it, and one line for what cannot be.

No test depends on how fast anything is: times are planted, or only their places are looked at.
"""

import json
from dataclasses import dataclass

import pytest
import torch

from hpctrain import Mesh
from hpctrain.comm import nodes, shared_memory
from hpctrain.comm.node import Node
from hpctrain.comm.tuning import place_of, read_tuning
from hpctrain.plan.allreduce import BUILT_IN
from hpctrain.plan.fit import best_bucket
from hpctrain.tools import tune, tune_buckets, tune_sums
from tests.harness.launch import ROOT
from tests.train.toys import Masked

TOYS, HERE = f"{ROOT}/tests/train/toys.py", f"{ROOT}/tests/tools/test_tune.py"
SMALL = ["--min-bytes", "64", "--max-bytes", "1024", "--repeats", "1"]
MESSAGES, SHARED = ["ring", "doubling"], ["windows", "staged"]


@dataclass
class Wrong(Masked):
    """Its layers are none."""

    def layers(self):
        return [torch.nn.Linear(2, 2)]


@pytest.fixture(autouse=True)
def threads_kept():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.mpi
def test_a_time_is_the_median_over_rounds_of_the_slowest_rank(comm):
    with Mesh(comm) as mesh:
        last = mesh.rank == mesh.size - 1
        own = {"a": [3.0, 1.0, 5.0 if last else 1.0], "b": [1.0, 2.0 if last else 1.0, 9.0]}
        assert tune_sums.slowest(mesh, own) == {"a": 3.0, "b": 2.0}
        assert tune_sums.slowest(mesh, {"none": [0.0]}) == {"none": 1e-9}


@pytest.mark.mpi
def test_rounds_are_interleaved_and_every_other_one_reversed(comm, monkeypatch):
    monkeypatch.setattr(tune_sums, "MOST_CALLS", 2)
    monkeypatch.setattr(tune_sums, "SECONDS", 1e9)
    called = []
    with Mesh(comm) as mesh:
        found = tune_sums.rounds_of(mesh, {name: lambda name=name: called.append(name) for name in "abc"}, 3)
    assert "".join(called) == "abc" + "abc" + "aabbcc" + "ccbbaa" + "aabbcc"
    assert list(found) == ["a", "b", "c"] and min(found.values()) > 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("which", ["one", "own", "two"])
def test_the_file_has_what_these_ranks_can_use_and_a_mesh_takes_it(comm, which, monkeypatch, shared_tmp_path, capsys):
    """On one node; each rank on its own; half of the ranks on each of two."""
    if which == "two" and (comm.size < 4 or comm.size % 2):
        pytest.skip("two nodes of two ranks at least")
    if which != "one":
        monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank if which == "own" else comm.rank % 2)
    out = shared_tmp_path / "tuning.json"
    assert tune.run(["--out", str(out), *SMALL], comm) == 0
    told = capsys.readouterr()
    assert told.err == "" and bool(told.out) == (comm.rank == 0)
    assert comm.rank or told.out.endswith(f"to train by these: --tuning {out}\n")
    values = json.loads(out.read_text())
    names = {"one": MESSAGES + SHARED, "own": MESSAGES, "two": [*MESSAGES, *SHARED, *tune_sums.BETWEEN]}[which]
    assert [list(row) for row in values["times"]] == [["bytes", *names]] * 3
    assert [row["bytes"] for row in values["times"]] == [64, 256, 1024]
    assert "bucket_bytes" not in values and values["mpi"]
    num_nodes = {"one": 1, "own": comm.size, "two": 2}[which]
    assert (values["ranks"], values["nodes"], values["ranks_per_node"]) == (
        comm.size,
        num_nodes,
        comm.size // num_nodes,
    )
    if which == "own":
        assert values["largest_staged"] == BUILT_IN.largest_staged
    with Mesh(comm, tuning=out) as mesh:
        assert mesh.tuning.place == place_of(mesh.data.ring)
        assert mesh.data.ring.constants == read_tuning(out).constants
    assert capsys.readouterr().err == "", "the same ranks, so no line about others"


@pytest.mark.mpi(min_size=2)
def test_with_a_task_sizes_of_buckets_are_measured_to_the_first_that_holds_all(
    comm, monkeypatch, shared_tmp_path, capsys
):
    monkeypatch.setattr(tune_buckets, "CANDIDATES", (64, 256, 1 << 20, 1 << 22))
    out = shared_tmp_path / "tuning.json"
    task = ["--task", f"{TOYS}:Masked", "--batch-size", "8", "--threads", "1"]
    assert tune.run(["--out", str(out), *SMALL, *task], comm) == 0
    values = json.loads(out.read_text())
    steps = {row["bucket_bytes"]: row["seconds"] for row in values["steps"]}
    assert list(steps) == [64, 256, 1 << 20] and min(steps.values()) > 0
    assert values["bucket_bytes"] == best_bucket(steps) == read_tuning(out).bucket_bytes
    assert values["task"] == f"{TOYS}:Masked"
    assert comm.rank or f"bucket bytes to take: {best_bucket(steps)}" in capsys.readouterr().out


@pytest.mark.mpi(min_size=4)
def test_stages_sum_up_over_their_replicas(comm, monkeypatch, shared_tmp_path):
    if comm.size % 2:
        pytest.skip("two stages")
    monkeypatch.setattr(tune_buckets, "CANDIDATES", (64, 1 << 20))
    out = shared_tmp_path / "tuning.json"
    task = ["--task", f"{TOYS}:Deep", "--stages", "2", "--batch-size", "16", "--threads", "1"]
    assert tune.run(["--out", str(out), *SMALL, *task], comm) == 0
    values = json.loads(out.read_text())
    assert values["ranks"] == comm.size // 2 and len(values["steps"]) == 2


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("which", ["nodes", "room"])
def test_where_stages_lie_unlike_what_all_can_use_is_measured(comm, monkeypatch, shared_tmp_path, which):
    """One stage on one node and the other on two; shared memory for the arrays of one stage alone."""
    if comm.size % 2:
        pytest.skip("two stages")
    first = comm.rank < comm.size // 2
    if which == "nodes":
        monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank if first else -1)
    elif first:
        monkeypatch.setattr(Node, "allocate", lambda self, nbytes: self.ring.agree("allocate") and None)
    monkeypatch.setattr(tune_buckets, "CANDIDATES", (1 << 20,))
    out = shared_tmp_path / "tuning.json"
    task = ["--task", f"{TOYS}:Deep", "--stages", "2", "--batch-size", "16", "--threads", "1"]
    assert tune.run(["--out", str(out), *SMALL, *task], comm) == 0
    values = json.loads(out.read_text())
    names = MESSAGES if which == "nodes" else [*MESSAGES, "staged"]
    assert [list(row) for row in values["times"]] == [["bytes", *names]] * 3
    assert values["nodes"] == (comm.size // 2 if which == "nodes" else 1)


@pytest.mark.mpi(min_size=2)
def test_steps_with_each_size_are_interleaved_on_the_same_rows(comm, monkeypatch):
    from hpctrain.config import Config
    from hpctrain.plan.tuning import Tuning
    from hpctrain.train.executor import Executor
    from hpctrain.train.layout import settled

    monkeypatch.setattr(tune_buckets, "CANDIDATES", (64, 1 << 20))
    ran, run_steps = [], Executor.run_steps
    monkeypatch.setattr(
        Executor, "run_steps", lambda self, *at: ran.append((len(self.gradients.buckets), *at)) or run_steps(self, *at)
    )
    config = settled(Config(task=f"{TOYS}:Masked", global_batch_size=8, threads=1), comm.size)
    assert list(tune_buckets.measured_steps(config, comm, Tuning(), 2)) == [64, 1 << 20]
    many, one = ran[0][0], ran[1][0]
    assert one == 1 < many
    assert ran == [(many, 0, 1), (one, 0, 1), (many, 1, 3), (one, 1, 3), (one, 4, 3), (many, 4, 3)]


@pytest.mark.mpi(min_size=2)
def test_what_goes_wrong_is_one_line_and_no_file_on_all_ranks(comm, shared_tmp_path, capsys, monkeypatch):
    out = shared_tmp_path / "tuning.json"
    for argv, what in (
        (["--out", str(shared_tmp_path / "no" / "x.json")], "no such folder"),
        (
            ["--out", str(out), *SMALL, "--task", f"{HERE}:Wrong"],
            "--task: layers() gave a Linear; it should give a list",
        ),
    ):
        assert tune.run(argv, comm) == 2
        err = capsys.readouterr().err
        assert bool(err) == (comm.rank == 0) and (not err or (what in err and err.count("\n") == 1))
        assert not list(shared_tmp_path.iterdir())
    monkeypatch.setattr(tune, "file_of", lambda *_: comm.rank or out.write_text("mine") and {})
    assert tune.run(["--out", str(out), *SMALL], comm) == 2
    err = capsys.readouterr().err
    assert err == ("" if comm.rank else f"hpctrain: {out}: exists already; name a new file\n")
    assert out.read_text() == "mine" and len(list(shared_tmp_path.iterdir())) == 1


@pytest.mark.mpi(min_size=2)
def test_standard_output_gets_the_file_alone(comm, shared_tmp_path, capsys):
    assert tune.run(["--out", "-", *SMALL], comm) == 0
    told = capsys.readouterr()
    if comm.rank:
        assert not told.out and not told.err
    else:
        (shared_tmp_path / "tuning.json").write_text(told.out)
        assert read_tuning(shared_tmp_path / "tuning.json").place.ranks == comm.size and "doubling ms" in told.err


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "allreduce, full_at",
    [("auto", 1), ("auto", 2.5), ("windows", 2)],
    ids=["before the second mesh", "in the third mesh", "where auto is no way out"],
)
def test_sizes_end_where_shared_memory_is_full(comm, monkeypatch, shared_tmp_path, capsys, allreduce, full_at):
    """What no longer fits would be summed up another way than in a run with that size."""
    from hpctrain.train import build

    monkeypatch.setattr(tune_buckets, "CANDIDATES", (64, 128, 256, 1 << 20))
    free, built, build_executor = shared_memory.shared_memory_free, [], build.build_executor

    def built_in_turn(*arguments):
        built.append(0.5)
        executor = build_executor(*arguments)
        built.append(0.5)
        return executor

    monkeypatch.setattr(build, "build_executor", built_in_turn)
    monkeypatch.setattr(shared_memory, "shared_memory_free", lambda: 0 if sum(built) >= full_at else free())
    out = shared_tmp_path / "tuning.json"
    task = ["--task", f"{TOYS}:Masked", "--batch-size", "8", "--threads", "1", "--allreduce", allreduce]
    assert tune.run(["--out", str(out), *SMALL, *task], comm) == 0
    values, sizes = json.loads(out.read_text()), [64, 128][: int(full_at)]
    assert [row["bucket_bytes"] for row in values["steps"]] == sizes
    assert values.get("bucket_bytes") in (sizes if len(sizes) > 1 else [None])
    told = f"so buckets of {64 << len(sizes)} bytes and more are not measured\n"
    assert (told in capsys.readouterr().err) == (comm.rank == 0)
