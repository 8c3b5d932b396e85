"""What jobs do under a real Slurm: they train, save when time is over, go on, and leave nothing behind."""

import json
import shlex
import sys
import time

import pytest

from tests.harness.launch import ROOT, mpirun, vendor

TASK = '''
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.tasks.text import Text


@dataclass(frozen=True)
class Paced(Text):
    """As slow as there is a file that says so, which changes no bit."""

    num_layers: int = 2
    width: int = 32
    context: int = 16

    def loss(self, outputs, targets):
        if Path("slow").exists():
            time.sleep(1)
        return super().loss(outputs, targets)
'''
NODES = ["--nodes", "2"]
PACED = ["--task", "paced.py:Paced", "--steps", "100", "--checkpoint-every", "5", "--eval-batches", "1"]
TINY = ["--steps", "3", "--eval-batches", "1"]
OF_TEXT = ["--task-option", "layers=2", "--task-option", "width=32", "--task-option", "context=16"]
WRITTEN = "# Written by: python -m hpctrain submit "
TRAINING = [path for path in sorted((ROOT / "jobs").glob("*.sbatch")) if WRITTEN in path.read_text()]


@pytest.fixture(scope="module", autouse=True)
def task(cluster):
    (cluster.work / "paced.py").write_text(TASK)


@pytest.fixture
def slow(cluster):
    """A file that makes training slow as long as it is there."""
    path = cluster.work / "slow"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def undisturbed(cluster, task):
    """The weights that nothing happened to."""
    job = cluster.submit(*NODES, "--", *PACED)
    cluster.wait(job, "COMPLETED", timeout=200)
    return summary(cluster, job, "Paced")["weights_sha256"]


def summary(cluster, job: str, task: str) -> dict:
    return json.loads((cluster.work / f"runs/{task}-{job}/summary.json").read_text())


def saved(cluster, job: str, timeout: float = 200) -> int:
    """Waits for the first checkpoint of a paced job; its step."""
    latest = cluster.work / f"runs/Paced-{job}/checkpoints/latest"
    cluster.until(job, lambda told: latest.exists(), "saved", timeout)
    return int(latest.read_text().removeprefix("step-"))


def smaller(words: list[str]) -> list[str]:
    """The same job with 4 ranks at most, of one thread each, a small model, and few steps."""
    num_nodes = int(words[words.index("--nodes") + 1])
    words[words.index("--ntasks-per-node") + 1] = str(4 // num_nodes)
    words[words.index("--cpus-per-task") + 1] = "1"
    if "--stages" in words:
        words[words.index("--stages") + 1] = str(4 // num_nodes)
    words[words.index("--steps") :] = TINY + ([] if "ratings" in words else OF_TEXT)
    return words


def trainers(cluster) -> list[str]:
    return [line for line in cluster.commands() if "-m hpctrain" in line or line.startswith("srun")]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_job_script_trains_to_its_end(cluster, path):
    written = next(line for line in path.read_text().splitlines() if line.startswith(WRITTEN))
    words = smaller(shlex.split(written.removeprefix(WRITTEN)))
    job = cluster.submit(*words)
    told = cluster.wait(job, "COMPLETED", timeout=200)
    name = "ratings" if "ratings" in words else "text"
    result = summary(cluster, job, name)
    assert result["done"] and result["layout"]["ranks"] == int(told["NumTasks"])
    assert f"step 3/3  loss {result['final_loss']:.4f}" in cluster.log(job)


def test_a_job_whose_time_runs_out_saves_and_goes_on_with_the_same_bits(cluster, undisturbed, slow):
    job = cluster.submit(*NODES, "--time", "3", "--signal-seconds", "110", "--", *PACED)
    cluster.until(job, lambda told: told["Restarts"] == "1", "queued again", timeout=200)
    slow.unlink()
    assert "asked to stop: saved in" in cluster.log(job) and f"job {job} is queued again" in cluster.log(job)
    cluster.wait(job, "COMPLETED", timeout=200)
    result = summary(cluster, job, "Paced")
    assert 0 < result["resumed_from"] < 100 and result["weights_sha256"] == undisturbed
    assert "step   1/100" in cluster.log(job) and "step 100/100" in cluster.log(job)  # one log, of both parts


def test_a_job_by_mpirun_saves_on_the_signal_and_goes_on_with_the_same_bits(cluster, undisturbed, slow):
    job = cluster.submit(*NODES, "--launcher", "mpirun", "--", *PACED)
    step = saved(cluster, job)
    cluster.say("scancel", "--signal=USR1", "--batch", job)  # as Slurm does, but now
    cluster.until(job, lambda told: told["Restarts"] == "1", "queued again", timeout=60)
    slow.unlink()
    cluster.wait(job, "COMPLETED", timeout=200)
    result = summary(cluster, job, "Paced")
    assert result["resumed_from"] >= step and result["weights_sha256"] == undisturbed


def test_a_job_that_is_cancelled_leaves_no_process_and_does_not_come_back(cluster, slow):
    job = cluster.submit(*NODES, "--", *PACED)
    saved(cluster, job)
    assert trainers(cluster)
    cluster.say("scancel", job)
    deadline = time.monotonic() + 30
    while left := trainers(cluster):
        assert time.monotonic() < deadline, left
        time.sleep(0.3)
    assert cluster.wait(job, "CANCELLED", timeout=60)["Restarts"] == "0"


def test_a_job_that_loses_a_node_goes_on_with_the_same_bits(cluster, undisturbed, slow):
    job = cluster.submit(*NODES, "--", *PACED)
    step = saved(cluster, job)
    cluster.kill("n2")
    cluster.until(job, lambda told: told["Restarts"] == "1", "queued again", timeout=200)
    slow.unlink()
    cluster.start("n2")
    cluster.wait(job, "COMPLETED", timeout=200)
    result = summary(cluster, job, "Paced")
    assert result["resumed_from"] >= step and result["weights_sha256"] == undisturbed


def test_the_jobs_of_an_array_have_a_folder_each(cluster):
    job = cluster.submit("--sbatch", "array=0-1", "--", *PACED, "--steps", "3")
    deadline = time.monotonic() + 120
    while len(found := list(cluster.work.glob("runs/Paced-*/summary.json"))) < 2 or cluster.say("squeue", "-h"):
        assert time.monotonic() < deadline, (job, found)
        time.sleep(0.3)
    logs = [path.parent.name.removeprefix("Paced-") for path in found]
    assert job in logs and sum("step 3/3" in cluster.log(each) for each in logs) >= 2


@pytest.mark.skipif(vendor(mpirun()[0]) != "MPICH", reason="a world of one where srun has no PMI is MPICH's")
def test_srun_without_the_pmi_of_this_mpi_is_refused_with_the_cure(cluster):
    start = ["srun", "--mpi=none", "-n", "2", sys.executable, "-m", "hpctrain", *TINY]
    result = cluster.run(*start, timeout=60)
    assert result.returncode == 1 and result.stderr.count("start with srun --mpi=pmi2") == 2, result


def test_a_job_that_slurm_refuses_is_told_in_one_line(cluster):
    result = cluster.run(sys.executable, "-m", "hpctrain", "submit", "--partition", "nowhere")
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result
    assert "Invalid partition name specified" in result.stderr
