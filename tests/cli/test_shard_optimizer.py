"""A shared optimizer as a user starts it: the same weights in the file, and less memory in the summary."""

import json

import pytest
from safetensors.numpy import load_file

from hpctrain.report.trace import read_trace
from tests.cli.test_train import KINDS, TINY, check_schema, train_several


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder and summary of a run with a whole optimizer, and of one with a shared one."""
    folder = tmp_path_factory.mktemp("runs") / "both"
    flags = {"whole": ["--allreduce", "ring"], "shared": ["--shard-optimizer"]}
    how = [*TINY, "--trace", "--eval-every", "3", "--eval-batches", "2", "--bucket-bytes", "4096"]
    trained = train_several(4, folder, {name: [*how, *extra] for name, extra in flags.items()})
    return {name: (folder / name, summary) for name, (summary, _) in trained.items()}


def losses(folder):
    return [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_trains_and_saves_the_same_bits(runs):
    (whole, expected), (shared, summary) = runs["whole"], runs["shared"]
    check_schema(summary, KINDS)
    for key in ("weights_sha256", "first_loss", "final_loss", "eval"):
        assert summary[key] == expected[key]
    weights, theirs = (load_file(folder / "model.safetensors") for folder in (shared, whole))
    assert weights.keys() == theirs.keys() and all((weights[name] == theirs[name]).all() for name in theirs)
    assert losses(shared) == losses(whole)
    assert "shard_optimizer = true" in (shared / "config.toml").read_text()


def test_each_rank_holds_a_share_of_the_state_and_sends_as_much(runs):
    expected, summary = runs["whole"][1], runs["shared"][1]
    whole = expected["optimizer_state_bytes"]
    assert len(whole) == 4 and len(set(whole)) == 1
    for nbytes in summary["optimizer_state_bytes"]:
        assert nbytes == pytest.approx(whole[0] / 4, rel=0.05)
    assert sum(summary["bytes_sent_per_rank"]) == sum(expected["bytes_sent_per_rank"])
    assert [each["bytes"] for each in summary["allreduce"]] == [each["bytes"] for each in expected["allreduce"]]


def test_the_trace_shows_weights_on_their_way(runs):
    traces, num_buckets = read_trace(runs["shared"][0] / "trace.json"), len(runs["shared"][1]["allreduce"])
    for trace in traces:
        names = [event.name for event in trace.events]
        assert names.count("GATHER") == names.count("STEP") == names.count("weights 0") == 6
        assert names.count(f"weights {num_buckets - 1}") == 6
    plain = read_trace(runs["whole"][0] / "trace.json")
    assert not any(event.name == "GATHER" for trace in plain for event in trace.events)
