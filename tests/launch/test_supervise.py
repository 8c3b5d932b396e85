"""The supervisor around mpirun, with a stand-in for mpirun: when it starts again, when it stops, what it leaves."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.launch import mpirun, supervise
from tests.harness.leftovers import MARK, new_mark, processes

STANDS_IN = """#!/bin/bash
[ "$1" = --version ] && exit
cd {folder}
printf '%s\\n' "$*" >>calls
save() {{ mkdir -p run/checkpoints && echo "step-$1" >run/checkpoints/latest; }}
finish() {{ mkdir -p run && echo '{{"done": true}}' >run/summary.json; }}
source "attempt-$(wc -l <calls)"
"""
WAITS = "touch started; for i in {1..200}; do sleep 0.05; done; exit 3"


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """Says what each call of mpirun does, in the words of a shell; the folder."""
    (tmp_path / "mpirun").write_text(STANDS_IN.format(folder=shlex.quote(str(tmp_path))))
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)

    def plan(*texts):
        for number, text in enumerate(texts, start=1):
            (tmp_path / f"attempt-{number}").write_text(text)
        return tmp_path

    return plan


def launch(folder, *argv, flags=()) -> int:
    given = ["-n", "2", "--mpirun", f"{folder}/mpirun -x", *argv]
    return supervise.run([*given, "--", "--run-dir", "run", *flags], None)


def calls(folder) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def lines(capsys) -> list[str]:
    out, err = capsys.readouterr()
    assert not out
    return [line.removeprefix("hpctrain launch: ") for line in err.splitlines()]


def test_a_run_that_is_done_is_started_once(attempts, capsys):
    folder = attempts("finish")
    assert launch(folder, flags=["--steps", "3"]) == 0 and lines(capsys) == []
    flags = "--checkpoint-every 100 --resume auto --run-dir run --steps 3"
    assert calls(folder) == [f"-x -n 2 {sys.executable} -m hpctrain {flags}"]


def test_it_starts_again_from_the_last_checkpoint_and_says_why(attempts, capsys):
    folder = attempts("mkdir run; exit 1", "save 000040; exit 75", "save 000080; kill -9 $$", "exit 0", "finish")
    assert launch(folder) == 0
    assert lines(capsys) == [
        "restart 1 of 3: mpirun ended with exit code 1; begins again",
        "restart 1 of 3: mpirun ended with exit code 75, saved on request; goes on from step 40",
        "restart 1 of 3: mpirun ended with exit code 137, as where a process was killed: most often memory ran out;"
        " goes on from step 80",
        "restart 2 of 3: mpirun ended with exit code 0, and the run is not done; goes on from step 80",
    ]
    assert len(set(calls(folder))) == 1 and len(calls(folder)) == 5


def test_it_gives_up_where_nothing_gets_on(attempts, capsys):
    folder = attempts("save 000040; exit 1", "exit 1", "exit 6")
    assert launch(folder, "--max-restarts", "2") == 6 and len(calls(folder)) == 3
    assert lines(capsys)[2] == (
        "gives up after 2 restarts without a new checkpoint: mpirun ended with exit code 6; "
        "the newest checkpoint is of step 40"
    )


@pytest.mark.parametrize(
    "code, means",
    [(9, "most often memory ran out"), (7, "/dev/shm is full"), (135, "/dev/shm is full"), (76, "no rank got on")],
)
def test_an_exit_code_is_told_in_words(attempts, code, means, capsys):
    """MPICH's mpirun gives the number of the signal that ended a rank, Open MPI's a shell's code for it."""
    folder = attempts(f"mkdir run; exit {code}")
    assert launch(folder, "--max-restarts", "0") == code
    assert means in lines(capsys)[0]


def test_what_never_began_is_not_tried_again(attempts, capsys):
    """As where mpirun knows a flag of --mpirun not, or no host answers: it would say the same again."""
    folder = attempts("exit 255", "finish")
    assert launch(folder) == 255 and len(calls(folder)) == 1
    assert lines(capsys) == [
        "mpirun ended with exit code 255, before the run had its folder, run: that is not tried again"
    ]


@pytest.mark.parametrize("attempt, code", [("mkdir run; exit 5", 5), ("mkdir run; exit 0", 1), ("finish; exit 3", 3)])
def test_without_restarts_the_first_failure_is_the_last(attempts, attempt, code, capsys):
    folder = attempts(attempt)
    assert launch(folder, "--max-restarts", "0") == code and len(calls(folder)) == 1
    assert "gives up after 0 restarts" in lines(capsys)[0]


def test_what_is_refused_is_not_tried_again(attempts, capsys):
    folder = attempts("exit 2")
    assert launch(folder) == 2 and len(calls(folder)) == 1 and lines(capsys) == []


def test_a_run_that_was_done_before_is_done(attempts):
    """Nothing was left to train, and its summary stays as it was."""
    folder = attempts("save 000040; exit 0", "exit 9")
    (folder / "run").mkdir()
    (folder / "run/summary.json").write_text(json.dumps({"done": True, "steps": 40}))
    assert launch(folder) == 0


def test_a_summary_of_an_earlier_time_is_no_end(attempts):
    folder = attempts("exit 0", "finish")
    (folder / "run").mkdir()
    (folder / "run/summary.json").write_text(json.dumps({"done": True}))
    assert launch(folder) == 0 and len(calls(folder)) == 2


def test_without_a_folder_it_chooses_and_prints_a_new_one(attempts, capsys, monkeypatch):
    folder = attempts("exit 2", "exit 2", "exit 2")
    monkeypatch.setattr(supervise.time, "strftime", lambda form: "now")
    start = ["-n", "1", "--mpirun", f"{folder}/mpirun", "--", "--task", "own.py:Name"]
    assert supervise.run(start, None) == 2
    (folder / "runs/Name-now").mkdir(parents=True)
    assert supervise.run(start, None) == 2
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert supervise.run(start, None) == 2
    names = ["runs/Name-now", "runs/Name-now-2", "runs/Name-7"]
    assert capsys.readouterr().out.splitlines() == [f"the run is in {name}" for name in names]
    assert [call.rsplit(" ", 1)[1] for call in calls(folder)] == names


def test_what_is_added_may_be_given(attempts):
    folder = attempts("finish")
    assert launch(folder, flags=["--resume", "auto", "--checkpoint-every", "5"]) == 0
    assert calls(folder)[0].endswith("-m hpctrain --run-dir run --resume auto --checkpoint-every 5")


@pytest.mark.parametrize(
    "argv, line",
    [
        (["-n", "2", "--", "--stages", "3"], "--stages 3: 2 ranks do not divide by it; 1, 2 would do"),
        (["--", "--steps", "3"], "-n: say how many ranks to start, as in -n 8"),
        (["-n", "2", "--mpirun", "/no/mpirun -x"], "--mpirun /no/mpirun -x: no such program; load an MPI, or name its"),
        (["-np", "0"], "-n/-np: expected a whole number >= 1, got '0'"),
        (["-n", "2", "--", "--resume", "runs/a"], "--resume runs/a: leave it out, --resume auto is added"),
        (["-n", "2", "--steps", "3"], "--steps: is a flag of train; give it behind --, as in -- --steps ..."),
        (["-n", "2", "--run-dir=a", "--", "--steps", "3"], "--run-dir: is a flag of train; give it behind --"),
        (["-n", "2", "--", "--task", "txet"], "--task txet: there is no such task; choose text, images, ratings,"),
    ],
)
def test_a_mistake_is_one_line(argv, line, capsys):
    assert supervise.run(argv, None) == 2
    (said,) = lines(capsys)
    assert said.startswith(line)


def supervised(folder, *argv, env=None) -> subprocess.Popen:
    """`hpctrain launch` in a process of its own, once its first attempt has begun."""
    command = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--mpirun", f"{folder}/mpirun", *argv]
    command += ["--", "--run-dir", "run"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    deadline = time.monotonic() + 30
    while not (folder / "started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
def test_a_signal_makes_the_ranks_save_and_nothing_starts_again(attempts, number):
    process = supervised(attempts(f"trap 'save 000007; exit 75' USR1; {WAITS}"))
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75
    assert err == (
        "hpctrain launch: asked to leave: mpirun ended with exit code 75, saved on request; the newest checkpoint is of"
        " step 7; with --run-dir run it goes on\n"
    )


def test_a_second_signal_ends_mpirun_and_a_third_one_kills_it(attempts):
    folder = attempts(f"trap 'touch usr1' USR1; trap 'touch term' TERM; {WAITS}")
    process = supervised(folder)
    for name in ("usr1", "term"):
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while not (folder / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 137


def test_what_outlives_mpirun_is_ended(attempts, monkeypatch):
    """Once it is what it is to be: a process has no marks for the moment in which it becomes another program."""
    monkeypatch.setattr(mpirun, "PATIENCE", 0.1)
    runs = "until grep -qaz ^100$ /proc/$!/cmdline && ! grep -qa setsid /proc/$!/cmdline; do :; done"
    folder = attempts(f"setsid sleep 100 & echo $! >orphan; {runs}; mkdir run; exit 1", "finish")
    assert launch(folder) == 0
    assert not mpirun.environment_of(int((folder / "orphan").read_text()))


def test_a_supervisor_that_is_killed_takes_mpirun_along(attempts):
    mark = new_mark()
    process = supervised(attempts(WAITS.replace("sleep", "exec -a waits sleep")), env={MARK: mark})
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes(mark)


def test_open_mpi_is_given_what_it_refuses_without(tmp_path, monkeypatch):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/bash\necho 'mpirun (Open MPI) 5.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(mpirun.sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setattr(mpirun.os, "getuid", lambda: 0)
    monkeypatch.setattr(mpirun.os, "sched_getaffinity", lambda pid: {0, 1})
    started = mpirun.Mpirun(None, 8)
    assert started.command == ["mpirun", "--oversubscribe", "-n", "8"]
    assert started.environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert mpirun.Mpirun(None, 2).command == ["mpirun", "-n", "2"]
    assert mpirun.Mpirun("mpirun --hostfile h", 8).command == ["mpirun", "--hostfile", "h", "-n", "8"]
