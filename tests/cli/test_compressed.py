"""--compress as a user starts it: half the bytes in the summary, about the same loss, a line where nothing is sent."""

import pytest

from tests.cli.test_train import KINDS, TINY, check_schema, train_several

FLAGS = {
    "plain": ["--allreduce", "ring"],
    "bf16": ["--allreduce", "ring", "--compress", "bf16"],
    "in memory": ["--compress", "bf16"],
    "largest": ["--compress", "topk:0.05", "--trace", "--clip-norm", "1"],
    "factors": ["--compress", "powersgd:2", "--allreduce", "ring", "--on-nan", "skip"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Summary and output of each."""
    folder = tmp_path_factory.mktemp("runs") / "all"
    return train_several(4, folder, {name: [*TINY, *flags] for name, flags in FLAGS.items()})


def test_half_the_bytes_travel_and_the_loss_is_near(runs):
    plain, bf16 = runs["plain"][0], runs["bf16"][0]
    check_schema(bf16, KINDS)
    assert sum(bf16["bytes_sent_per_rank"]) * 2 == sum(plain["bytes_sent_per_rank"]) > 0
    assert {each["compress"] for each in bf16["allreduce"]} == {"bf16"}
    assert {each["compress"] for each in plain["allreduce"]} == {"none"}
    assert bf16["weights_sha256"] != plain["weights_sha256"]
    assert bf16["final_loss"] == pytest.approx(plain["final_loss"], rel=0.01)


@pytest.mark.parametrize("name, compress", [("largest", "topk:0.05"), ("factors", "powersgd:2")])
def test_a_part_of_the_gradients_travels_and_it_learns(runs, name, compress):
    plain, summary = runs["plain"][0], runs[name][0]
    check_schema(summary, KINDS)
    assert {each["compress"] for each in summary["allreduce"]} == {compress}
    assert 0 < sum(summary["bytes_sent_per_rank"]) < 0.6 * sum(plain["bytes_sent_per_rank"])
    assert summary["final_loss"] < summary["first_loss"]


def test_where_nothing_is_sent_a_line_says_so_and_the_bits_stay(runs):
    summary, outcome = runs["in memory"]
    assert outcome.stderr.count("note: --compress bf16 has no effect: the ranks share a node") == 1
    assert {each["compress"] for each in summary["allreduce"]} == {"none"}
    assert summary["weights_sha256"] == runs["plain"][0]["weights_sha256"]
