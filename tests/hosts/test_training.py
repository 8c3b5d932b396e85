"""Training over several hosts is training on one: the same layout gives the same bits."""

import json
import sys

import pytest

from tests.harness.launch import ROOT, run_mpi
from tests.hosts.trained import LAYOUTS


def trained(run, folder) -> dict[str, dict]:
    """The summaries of what `run` has trained, by layout."""
    folder.mkdir()
    result = run([sys.executable, ROOT / "tests/hosts/trained.py", folder])
    assert result.returncode == 0, result
    return {name: json.loads((folder / name / "summary.json").read_text()) for name in LAYOUTS}


@pytest.fixture(scope="module")
def on_four(four, tmp_path_factory):
    return trained(lambda argv: four.run_mpi(2, argv, timeout=240), tmp_path_factory.mktemp("runs") / "on-four")


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    return trained(lambda argv: run_mpi(8, argv, timeout=240), tmp_path_factory.mktemp("runs") / "on-one")


@pytest.mark.parametrize(
    "name, layout",
    [
        ("replicas", {"stages": 1, "replicas": 8, "servers": 0, "ranks": 8}),
        ("compressed", {"stages": 1, "replicas": 8, "servers": 0, "ranks": 8}),
        ("largest", {"stages": 1, "replicas": 8, "servers": 0, "ranks": 8}),
        ("stages", {"stages": 4, "replicas": 2, "servers": 0, "ranks": 8}),
        ("server", {"stages": 1, "replicas": 7, "servers": 1, "ranks": 8}),
    ],
)
def test_eight_ranks_on_four_hosts_train_what_they_train_on_one(on_four, on_one, name, layout):
    assert on_four[name]["layout"] == on_one[name]["layout"] == layout
    assert on_four[name]["weights_sha256"] == on_one[name]["weights_sha256"]
    assert on_four[name]["final_loss"] == on_one[name]["final_loss"]


def test_sums_in_two_levels_train_the_same_up_to_rounding(on_four, on_one):
    four, one = on_four["two levels"], on_one["two levels"]
    assert {each["algorithm"] for each in four["allreduce"] + one["allreduce"]} == {"windows"}
    assert four["final_loss"] == pytest.approx(one["final_loss"], rel=1e-5)
    assert one["weights_sha256"] == on_one["replicas"]["weights_sha256"]
    assert four["bytes_sent_per_rank"] != one["bytes_sent_per_rank"]


def test_compressed_sums_halve_what_travels_and_change_little(on_four):
    for plain, compressed in (("replicas", "compressed"), ("two levels", "compressed in two levels")):
        before, after = on_four[plain], on_four[compressed]
        assert {each["compress"] for each in after["allreduce"]} == {"bf16"}
        assert sum(after["bytes_sent_per_rank"]) * 2 == sum(before["bytes_sent_per_rank"]) > 0
        assert after["final_loss"] == pytest.approx(before["final_loss"], rel=0.01)
        assert after["weights_sha256"] != before["weights_sha256"]


def test_the_doctor_finds_all_hosts(four):
    result = four.run_mpi(2, [sys.executable, "-m", "hpctrain", "doctor"], timeout=60)
    assert result.returncode == 0 and all(name in result.stdout for name in four.names), result
