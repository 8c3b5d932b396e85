"""tune over several hosts: messages between nodes are measured apart, and a run takes what comes of it."""

import json
import sys

from hpctrain.comm.tuning import read_tuning
from tests.cli.test_train import MODULE, TINY


def test_a_run_over_hosts_goes_by_what_was_measured_between_them(four, tmp_path):
    out, again = tmp_path / "tuning.json", tmp_path / "again"
    flags = ["--out", out, "--min-bytes", "1024", "--max-bytes", "65536", "--repeats", "1"]
    result = four.run_mpi(2, [sys.executable, *MODULE, "tune", *map(str, flags)], timeout=120)
    assert result.returncode == 0, result
    tuning = read_tuning(out)
    assert (tuning.place.ranks, tuning.place.nodes, tuning.place.ranks_per_node) == (8, 4, 2)
    assert {"nodes ring", "nodes doubling", "windows", "staged"} < json.loads(out.read_text())["times"][0].keys()
    found = []
    for folder, settings in (
        (tmp_path / "run", [*TINY, "--tuning", out]),
        (again, ["--config", tmp_path / "run" / "config.toml"]),
    ):
        argv = [sys.executable, *MODULE, "--run-dir", folder, *settings]
        result = four.run_mpi(2, list(map(str, argv)), timeout=120)
        assert result.returncode == 0 and "the tuning was measured" not in result.stderr, result
        found.append(json.loads((folder / "summary.json").read_text()))
    assert found[0]["tuning"] == found[1]["tuning"] == {**vars(tuning.constants), "bucket_bytes": 1 << 20}
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
