"""`hpctrain submit`: writes a job script for Slurm and submits it; with --dry-run it only prints it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from hpctrain.config import Parser, UsageError
from hpctrain.launch import flags as of_train
from hpctrain.launch.script import Job, write
from hpctrain.launch.values import at_least, wrong_start

ENVIRONMENT = Path("jobs/env.sh")


class SubmitError(RuntimeError):
    """No job came of it; the message is one line."""


def run(argv: list[str], world) -> int:
    """Returns 0, 1 where Slurm refused, or 2 with one line for what cannot be asked for."""
    if world is not None:
        return wrong_start("submit", world)
    try:
        text, dry = script_of(argv)
        if dry:
            print(text, end="")
        else:
            print(submit(text))
    except (UsageError, SubmitError) as error:
        print(f"hpctrain submit: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def script_of(argv: list[str]) -> tuple[str, bool]:
    """The script that `argv` asks for, and whether it is only to be printed. UsageError."""
    own, flags = of_train.split(argv)
    told = of_train.parse_own(parser(), own)
    dry = told.pop("dry_run")
    job = Job(**{each.name: told[each.name] for each in dataclasses.fields(Job)})
    config = of_train.checked(flags, job.num_ranks)
    if config.run_dir is not None and any(text.startswith("array") for text in job.more):
        raise UsageError(f"--run-dir {config.run_dir}: the jobs of an array need one each; leave it out")
    return write(job, config, flags, [word for word in argv if word != "--dry-run"]), dry


def submit(text: str) -> str:
    """What sbatch says of the new job. SubmitError."""
    if not ENVIRONMENT.exists():
        raise SubmitError(f"{ENVIRONMENT}: not here; `python -m hpctrain files .` copies it, then look into it")
    try:
        done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True)
    except OSError as error:
        raise SubmitError(f"sbatch: {error.strerror}; where there is no Slurm, --dry-run prints the script") from None
    if done.returncode:
        said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise SubmitError(said or f"sbatch ended with exit code {done.returncode}")
    print(done.stderr, end="", file=sys.stderr)
    return done.stdout.strip()


def parser() -> Parser:
    top = Parser(
        "hpctrain submit", usage="hpctrain submit [flags] -- [flags of train]", add_help=False, allow_abbrev=False
    )
    count, job = at_least(1), Job()
    top.add_argument("--nodes", type=count, default=job.nodes, metavar="N", help="machines (1)")
    top.add_argument(
        "--ntasks-per-node", type=count, default=job.ntasks_per_node, metavar="N", help="ranks on each (1)"
    )
    top.add_argument("--cpus-per-task", type=count, default=job.cpus_per_task, metavar="N", help="threads a rank (1)")
    top.add_argument("--time", default=job.time, metavar="TIME", help=f"limit of one part of the run ({job.time})")
    top.add_argument("--partition", metavar="NAME", help="of the cluster")
    top.add_argument("--account", metavar="NAME", help="that pays")
    top.add_argument("--job-name", default=job.job_name, metavar="NAME", help=f"({job.job_name})")
    top.add_argument(
        "--signal-seconds",
        type=count,
        default=job.signal_seconds,
        metavar="S",
        help=f"before the limit the run saves and is queued again ({job.signal_seconds})",
    )
    top.add_argument(
        "--launcher", choices=("srun", "mpirun"), default=job.launcher, help="what starts the ranks (srun)"
    )
    top.add_argument(
        "--sbatch",
        dest="more",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of sbatch, as mem=64G or exclusive; may be repeated",
    )
    top.add_argument("--dry-run", action="store_true", help="print the script; needs no Slurm")
    return top
