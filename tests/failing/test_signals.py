"""What mpirun does with a signal, and what becomes of the run: docs/signals.md tells what is seen here."""

import signal
import sys

import pytest

from hpctrain.train import checkpoint_files as files
from hpctrain.train.signals import REQUEUE
from tests.harness.launch import ROOT, mpirun, vendor
from tests.soak.job import Job, kill, num_lines

FLAGS = (
    *("--task", f"{ROOT}/tests/train/toys.py:Masked", "--precision", "float64", "--batch-size", "13", "--threads", "1"),
    *("--steps", "5000", "--checkpoint-every", "5"),
)
GONE = 60.0  # seconds, on a machine that does other things too
OPENMPI = vendor(mpirun()[0]) == "Open MPI"


def steps_of_whole(root) -> list[int]:
    """Of all that has the name of a checkpoint, each found whole; the newest first."""
    found = files.newest_first(root)
    for folder in found:
        for each in files.files_of(folder, files.read_manifest(folder)):
            files.check_file(folder, each)
    assert (root / files.LATEST).read_text().strip() in {folder.name for folder in found}
    return [int(files.NAME.fullmatch(folder.name)[1]) for folder in found]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("to", ["mpirun", "rank 1"])
def test_a_signal_ends_the_job_and_what_was_saved_is_whole(to, number, tmp_path):
    """prterun passes on all signals, but ends ranks a moment after SIGTERM and SIGINT, in the middle of a save too."""
    run = tmp_path / "run"
    with Job(2, [sys.executable, "-m", "hpctrain", *FLAGS, "--run-dir", run], tmp_path / "output") as job:
        assert job.wait(lambda: num_lines(run) >= 7), job.told()
        pid = job.process.pid if to == "mpirun" else job.ranks()[1]
        kill(pid, number)
        job.gone(GONE)
        code, told = job.process.returncode, job.told()
    saved = steps_of_whole(run / "checkpoints")
    assert not (run / "summary.json").exists()
    if OPENMPI and to == "mpirun" and number != signal.SIGUSR1:
        assert code == 1 and saved[0] >= 5, told
        return
    assert code == REQUEUE, told
    assert f"asked to stop: saved in {run}/checkpoints/{files.name_of(saved[0])}" in told
    assert saved[0] == num_lines(run), "of the last step that was made"
