"""The job scripts: they parse, start what they promise, know only flags that exist, and hold nobody's paths."""

import re
import shlex
import shutil
import subprocess

import pytest

from hpctrain import config
from hpctrain.launch.submit import script_of
from tests.harness.launch import ROOT

SCRIPTS = sorted((ROOT / "jobs").glob("*.sbatch"))
TRAINING = [path for path in SCRIPTS if "-m hpctrain" in path.read_text()]
FILES = [*SCRIPTS, *(ROOT / "jobs").glob("*.sh")]
PERSONAL = re.compile(r"(?<!\$HOME)/(home|root|Users|work|scratch|data|opt)/")


WRITTEN = "# Written by: python -m hpctrain submit "


def ids(path):
    return path.name


def commands(text: str) -> list[str]:
    """What follows `python -m hpctrain` in each command, also in those that stand in comments."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.split("python -m hpctrain", 1)[1] for line in lines if " -m hpctrain -" in line]
    return [command.removesuffix(" &") for command in found]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_bash_can_read_it(path):
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_personal_paths(path):
    assert not PERSONAL.search(path.read_text())


def test_a_personal_path_would_be_found():
    assert PERSONAL.search("source /home/me/venv/bin/activate")


def test_there_is_a_job_for_each_kind_of_training():
    assert [path.stem for path in TRAINING] == ["data_parallel", "hybrid", "parameter_server", "pipeline"]


@pytest.mark.parametrize("path", TRAINING, ids=ids)
def test_it_is_what_submit_writes(path):
    text = path.read_text()
    command = next(line for line in text.splitlines() if line.startswith(WRITTEN)).removeprefix(WRITTEN)
    renew = f"python -m hpctrain submit --dry-run {command} >jobs/{path.name}"
    assert text == script_of(shlex.split(command))[0], f"renew it: {renew}"


@pytest.mark.parametrize("path", TRAINING, ids=ids)
def test_both_variants_use_flags_that_exist_and_agree(path):
    srun, mpirun = commands(path.read_text())
    known = {name for action in config.parser()._actions for name in action.option_strings}
    assert set(re.findall(r"(?<=\s)--[a-z-]+", srun)) <= known
    assert srun.split() == mpirun.split()
    config.parse(srun.replace('"$THREADS"', "4").split())


@pytest.mark.parametrize("path", SCRIPTS, ids=ids)
def test_srun_is_told_to_end_all_ranks_with_one(path, tmp_path):
    words = words_of_srun(path, tmp_path)
    assert words.count("--kill-on-bad-exit=1") == words.count("--mpi=pmi2") == words.count("python") > 0


@pytest.mark.parametrize("path", TRAINING, ids=ids)
def test_srun_gives_each_task_its_cores(path, tmp_path):
    words = words_of_srun(path, tmp_path)
    assert words[:4] == ["--mpi=pmi2", "--kill-on-bad-exit=1", "--cpus-per-task=3", "python"]
    assert words[words.index("--threads") + 1] == "3"


def test_the_benchmarks_of_a_job_are_there(tmp_path):
    words = words_of_srun(ROOT / "jobs/osu.sbatch", tmp_path)
    scripts = [word for word in words if word.startswith("benchmarks/")]
    there = {path.name for path in (ROOT / "benchmarks").glob("osu_*.py") if "TEST = " in path.read_text()}
    assert {script.removeprefix("benchmarks/") for script in scripts} == there and len(scripts) == 16
    sums = [words[at + 2] for at, word in enumerate(words) if word == "benchmarks/osu_allreduce.py"]
    assert sums == ["mpi", "auto", "ring", "doubling"]


def words_of_srun(path, tmp_path) -> list[str]:
    """What a job gives to all its srun, one after the other."""
    fake = tmp_path / "srun"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "3"}
    done = subprocess.run(["bash", path], env=env, capture_output=True, text=True, check=True)
    return [word for word in done.stdout.splitlines() if not word.startswith("# ")]
