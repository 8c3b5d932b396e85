"""The job that `submit` writes and submits: what it asks Slurm for, what its shell does, what is refused before."""

import os
import subprocess

import pytest

from hpctrain import config
from hpctrain.launch import flags as of_train
from hpctrain.launch import submit
from hpctrain.launch.script import in_seconds
from tests.harness.launch import ROOT

SLURM = {"SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}
TRAINS = """#!/bin/bash
printf '%s\\n' "$@" >{folder}/asked
trap 'exit {on_signal}' USR1
touch {folder}/started
for i in {{1..200}}; do sleep 0.05; done
exit 3
"""


def script(*argv) -> str:
    return submit.script_of([*argv])[0]


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]


def program(path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where jobs/env.sh is, programs in `bin` are found first, and the shell of a job starts."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/env.sh").write_text("SRUN_MPI=pmi2\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def start(folder, text: str) -> subprocess.Popen:
    """The script as Slurm starts it."""
    env = {**os.environ, **SLURM, "SLURM_SUBMIT_DIR": str(folder)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["bash", "-c", text], env=env, **pipes)


def ended(process: subprocess.Popen, folder, *signals: str) -> tuple[int, str, str]:
    """Exit code and output, after each signal was sent to the shell alone."""
    while not (folder / "started").exists():
        assert process.poll() is None, process.communicate()
    for name in signals:
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_slurm_is_asked_for_what_the_flags_say():
    asked = ["--nodes", "2", "--ntasks-per-node", "4", "--cpus-per-task", "3", "--time", "2-0", "--partition", "p"]
    more = [
        "--account",
        "a",
        "--job-name",
        "j",
        "--signal-seconds",
        "60",
        "--sbatch",
        "mem=64G",
        "--sbatch",
        "exclusive",
    ]
    assert options(script(*asked, *more)) == [
        *("job-name=j", "nodes=2", "ntasks-per-node=4", "cpus-per-task=3", "time=2-0", "partition=p", "account=a"),
        *("signal=B:USR1@60", "mem=64G", "exclusive", "requeue", "open-mode=append", "output=%x-%j.log"),
    ]


@pytest.mark.parametrize(
    "given, added",
    [
        ([], '--threads "$THREADS" --checkpoint-every 100 --resume auto'),
        (["--checkpoint-every", "7"], '--threads "$THREADS" --resume auto --checkpoint-every 7'),
        (["--threads", "2"], "--checkpoint-every 100 --resume auto --threads 2"),
        (["--task-option", "a=b c"], "--resume auto --task-option 'a=b c'"),
    ],
)
def test_a_job_goes_on_from_its_checkpoints_and_shares_its_cores(given, added):
    assert f"{added} &\n" in script("--", *given)


def test_what_a_file_says_is_not_said_again(tmp_path):
    (tmp_path / "run.toml").write_text("checkpoint_every = 5\nthreads = 1\n")
    named = ["--config", str(tmp_path / "run.toml")]
    assert f"    python -m hpctrain --resume auto {' '.join(named)} &\n" in script("--", *named)


@pytest.mark.parametrize("launcher, first, on_signal", [("srun", "--mpi=pmi2", 137), ("mpirun", "-n", 75)])
def test_time_that_runs_out_saves_and_queues_the_job_again(folder, launcher, first, on_signal):
    program(folder / "bin" / launcher, TRAINS.format(folder=folder, on_signal=on_signal))
    program(folder / "bin/scontrol", f'#!/bin/bash\necho "$@" >{folder}/requeued\n')
    job = start(folder, script("--launcher", launcher, "--", "--steps", "3"))
    code, out, err = ended(job, folder, "USR1")
    assert (code, err) == (75, "") and "job 7 is queued again" in out
    assert (folder / "requeued").read_text() == "requeue 7\n"
    words = (folder / "asked").read_text().split()
    assert words[0] == first and words[words.index("--threads") + 1] == "3" and words[-2:] == ["--steps", "3"]


def test_a_signal_that_comes_twice_waits_for_the_same_end(folder):
    program(folder / "bin/srun", TRAINS.format(folder=folder, on_signal=75))
    program(folder / "bin/scontrol", "#!/bin/bash\n")
    assert ended(start(folder, script()), folder, "USR1", "USR1")[0] == 75


def test_a_run_that_fails_when_it_should_save_is_not_queued_again(folder):
    program(folder / "bin/srun", TRAINS.format(folder=folder, on_signal=1))
    assert ended(start(folder, script()), folder, "USR1") == (1, "", "")


def test_a_job_that_is_cancelled_saves_and_stays_away(folder):
    program(folder / "bin/srun", TRAINS.format(folder=folder, on_signal=75))
    code, out, err = ended(start(folder, script()), folder, "TERM")
    assert (code, out, err) == (75, "", "")  # without an scontrol


@pytest.mark.parametrize("code", (0, 1, 2, 137))
def test_the_exit_code_of_the_ranks_is_that_of_the_job(folder, code):
    program(folder / "bin/srun", f"#!/bin/bash\nexit {code}\n")
    job = start(folder, script())
    assert (*job.communicate(timeout=30), job.returncode) == ("", "", code)


def test_where_the_job_cannot_be_queued_again_a_line_says_what_can_be_done(folder):
    program(folder / "bin/srun", TRAINS.format(folder=folder, on_signal=75))
    program(folder / "bin/scontrol", "#!/bin/bash\nexit 1\n")
    code, _, err = ended(start(folder, script()), folder, "USR1")
    assert code == 75 and "submit again with the --run-dir of this run" in err


def test_without_its_environment_a_job_ends_at_once(folder):
    (folder / "jobs/env.sh").unlink()
    job = start(folder, script())
    assert "jobs/env.sh" in job.communicate(timeout=30)[1] and job.returncode == 1


def test_what_is_printed_is_what_is_submitted(folder, capsys):
    program(folder / "bin/sbatch", f"#!/bin/bash\ncat >{folder}/script\necho Submitted batch job 12\n")
    assert submit.run(["--dry-run", "--nodes", "2"], None) == 0
    printed = capsys.readouterr().out
    assert submit.run(["--nodes", "2"], None) == 0
    assert capsys.readouterr() == ("Submitted batch job 12\n", "")
    assert (folder / "script").read_text() == printed


def test_the_command_that_wrote_a_script_stands_in_it():
    text = script("--nodes", "2", "--dry-run", "--", "--task-option", "a=b c")
    assert "# Written by: python -m hpctrain submit --nodes 2 -- --task-option 'a=b c'\n" in text


@pytest.mark.parametrize(
    "sbatch, line",
    [
        (None, "sbatch: No such file or directory; where there is no Slurm, --dry-run prints the script"),
        (
            "echo 'sbatch: error: one' >&2; echo 'sbatch: error: two' >&2; exit 1",
            "sbatch: error: one; sbatch: error: two",
        ),
        ("exit 9", "sbatch ended with exit code 9"),
    ],
)
def test_where_slurm_takes_no_job_one_line_says_why(folder, capsys, monkeypatch, sbatch, line):
    monkeypatch.setenv("PATH", f"{folder / 'bin'}")
    if sbatch:
        program(folder / "bin/sbatch", f"#!/bin/bash\n{sbatch}\n")
    assert submit.run([], None) == 1
    assert capsys.readouterr() == ("", f"hpctrain submit: {line}\n")


def test_a_folder_without_the_environment_is_told_before_anything_is_submitted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert submit.run([], None) == 1
    assert "jobs/env.sh: not here; `python -m hpctrain files .` copies it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--", "--stepz", "3"], "--stepz: no such flag; did you mean --steps?"),
        (["--steps", "3"], "--steps: is a flag of train; give it behind --, as in -- --steps ..."),
        (["--", "--task", "txet"], "--task txet: there is no such task; choose text, images, ratings, FILE.py:Name or"),
        (["--node", "2"], "--node: no such flag; did you mean --nodes?"),
        (["--nodes", "0"], "--nodes: expected a whole number >= 1, got '0'"),
        (["--nodes", "2", "--", "--stages", "3"], "--stages 3: 2 ranks do not divide by it; 1, 2 would do"),
        (["--", "--servers", "1"], "--servers 1: of 1 in all that leaves no rank to train"),
        (["--", "doctor"], "doctor: after -- come the flags of train, without a command"),
        (["--", "--resume", "runs/a"], "--resume runs/a: leave it out, --resume auto is added; to go on with a run,"),
        (["--time", "soon"], "--time soon: expected minutes, H:M:S or D-H:M:S, such as 4:00:00"),
        (
            ["--time", "3"],
            "--signal-seconds 120: leaves nothing of --time 3 to train in, as Slurm may signal 60 seconds",
        ),
        (["--job-name", "my job"], "--job-name 'my job': expected a word without spaces and quotes"),
        (["--sbatch", "time=5"], "--sbatch time=5: the script has --time already"),
        (["--sbatch=--mem=5G"], "--sbatch '--mem=5G': expected NAME or NAME=VALUE, such as mem=64G"),
        (["--sbatch", "array=1-2", "--", "--run-dir", "x"], "--run-dir x: the jobs of an array need one each"),
        (["--", "--run-dir", "a\nb"], "'a\\nb': a job script cannot hold it"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_submitted(argv, line, capsys, monkeypatch):
    monkeypatch.setattr(submit, "submit", lambda text: pytest.fail("submitted"))
    assert submit.run(argv, None) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"hpctrain submit: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, seconds",
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-0", 172800), ("1-2:3", 93780), ("1-2:3:4", 93784)],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text, seconds):
    assert in_seconds(text) == seconds


def test_the_layout_is_told_in_words():
    parsed = config.parse(["--servers", "1"])[0]
    assert of_train.layout(parsed, 8) == "8 ranks: 1 stage x 7 replicas, 1 server"


def test_many_ranks_submit_nothing(capsys):
    class World:
        rank = 0

    assert submit.run([], World()) == 2
    assert capsys.readouterr().err == "hpctrain submit: start it once, without mpirun or srun\n"


def test_help_names_the_flags_of_both():
    done = subprocess.run(
        ["python", "-m", "hpctrain", "submit", "--help"], capture_output=True, text=True, cwd=ROOT, timeout=30
    )
    assert "hpctrain submit [flags] -- [flags of train]" in done.stdout and "--signal-seconds" in done.stdout
