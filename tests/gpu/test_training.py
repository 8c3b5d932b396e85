"""Every way to train, by the command line: the losses on a device are those on the processor, step by step."""

import json

import pytest

from tests.cli.several import several
from tests.gpu.launched import remembered
from tests.gpu.runs import RUNS, faults, losses

CASES = [(ranks, name) for ranks, runs in RUNS.items() for name in runs]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run, by ranks, device and name. All runs on as many ranks and such a device are one launch."""

    @remembered
    def launched(ranks: int, device: str, aware: str) -> tuple:
        folder = tmp_path_factory.mktemp("runs") / f"{device}-{ranks}"
        commands = {
            name: ["--run-dir", folder / name, "--device", device, *flags] for name, flags in RUNS[ranks].items()
        }
        return folder, several(ranks, folder, commands, timeout=90, env={"HPCTRAIN_CUDA_AWARE": aware or None})

    def folder_of(ranks: int, device: str, name: str, aware: str = ""):
        folder, results = launched(ranks, device, aware)
        assert results[name].returncode == 0, results[name]
        return folder / name

    return folder_of


def summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("ranks, name", CASES)
def test_losses_on_a_device_are_those_on_the_processor(trained, ranks, name):
    there, here = trained(ranks, "cuda", name), trained(ranks, "cpu", name)
    assert faults(losses(here), losses(there), name) == []


@pytest.mark.parametrize("ranks, name", CASES)
def test_the_summary_says_where_it_ran_and_what_went_which_way(trained, ranks, name):
    there, here = summary(trained(ranks, "cuda", name)), summary(trained(ranks, "cpu", name))
    assert there["done"] and there["environment"]["device"].startswith("cuda:")
    assert here["done"] and here["environment"]["device"] == "cpu"
    assert here["staged_bytes"] == here["direct_bytes"] == 0
    assert (there["staged_bytes"] + there["direct_bytes"] > 0) == (ranks > 1)


@pytest.mark.parametrize("name", RUNS[2])
def test_direct_runs_train_what_staged_ones_do(trained, name):
    direct = trained(2, "cuda", name)
    if not summary(direct)["direct_bytes"]:
        pytest.skip("this MPI takes memory of the host only: `doctor` says who says so")
    staged = trained(2, "cuda", name, "0")
    assert summary(staged)["direct_bytes"] == 0
    assert faults(losses(staged), losses(direct), name) == []
