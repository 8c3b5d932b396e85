"""The text of a job script for Slurm: it trains until its time is over, saves, and is queued again until it is done.

Slurm tells the shell of the script, not the ranks, that time runs out (`--signal=B:`), so training runs in the
background and the shell waits: only then can it hear the signal, and hand it on.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from hpctrain.config import Config, UsageError
from hpctrain.launch.flags import added, layout

COMMAND = "python -m hpctrain"
OWN = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "partition", "account", "signal", "requeue"}
EARLY = 60  # seconds that Slurm may send the signal before it is due
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # as sbatch takes it
WORD = re.compile(r"[\w.,:@%+=/*\[\]()&|-]+")

SCRIPT = """\
#!/bin/bash
# Written by: {written_by}
# {layout}. Submit it by sbatch, from the folder that holds jobs/env.sh.
{options}
# Your site may also want --partition, --account, --mem. With GPUs take a # of both away; each rank sees all:
##SBATCH --gpus-per-node={ntasks}
##SBATCH --gpu-bind=none

set -uo pipefail
cd "${{SLURM_SUBMIT_DIR:?submit this file with sbatch}}" || exit
source jobs/env.sh || exit

THREADS=${{SLURM_CPUS_PER_TASK:-1}} # newer Slurm does not pass --cpus-per-task on to srun by itself

# A signal that the ranks are handed on makes them save, and leave with exit code 75.
signals=0 cancelled=''
ask() {{ signals=$((signals + 1)) && kill -USR1 "$!"; }}
trap ask USR1                  # {seconds} seconds before the time limit
trap 'cancelled=yes; ask' TERM # scancel, or the time limit itself

{start}

code=0 heard=-1
while [ "$heard" -ne "$signals" ]; do # a signal ends wait before the ranks end
    heard=$signals code=0
    wait "$!" || code=$?
done

# srun kills ranks that leave a moment after the first one, and tells of that, by a code above 128
if [ -z "$cancelled" ] && [ "$signals" -gt 0 ] && [ "$code" -gt 128 ]; then code=75; fi
if [ -z "$cancelled" ] && [ "$code" -eq 75 ]; then
    echo "saved after $SECONDS s; job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID" || echo "it cannot be; to go on, submit again with the --run-dir of this run" >&2
fi
exit "$code"
"""
SRUN = """\
{mark}srun --mpi="$SRUN_MPI" --kill-on-bad-exit=1 --cpus-per-task="$THREADS" \\
{mark}    {train} &"""
MPIRUN = """\
{mark}mpirun -n "$SLURM_NTASKS" \\
{mark}    {train} &"""
HINTS = {
    "srun": "# By the MPI's own mpirun, where srun does not know this MPI (Open MPI: --bind-to none when threads > 1):",
    "mpirun": "# By srun, where it knows this MPI (above, Open MPI wants --bind-to none when threads > 1):",
}


@dataclass(frozen=True)
class Job:
    """What Slurm is asked for; `more`: further options of sbatch, NAME or NAME=VALUE.

    UsageError for what sbatch, or a shell, would take for something else.
    """

    nodes: int = 1
    ntasks_per_node: int = 1
    cpus_per_task: int = 1
    time: str = "1:00:00"
    job_name: str = "hpctrain"
    partition: str | None = None
    account: str | None = None
    signal_seconds: int = 120
    launcher: str = "srun"
    more: tuple[str, ...] = ()

    def __post_init__(self):
        for flag, text in (("job-name", self.job_name), ("partition", self.partition), ("account", self.account)):
            if text is not None and not WORD.fullmatch(text):
                raise UsageError(f"--{flag} {text!r}: expected a word without spaces and quotes")
        for text in self.more:
            name = text.partition("=")[0]
            if not WORD.fullmatch(text) or name.startswith("-"):
                raise UsageError(f"--sbatch {text!r}: expected NAME or NAME=VALUE, such as mem=64G or exclusive")
            if name in OWN | {"open-mode", "output"}:
                raise UsageError(f"--sbatch {text}: the script has --{name} already")
        if in_seconds(self.time) <= self.signal_seconds + EARLY:
            raise UsageError(
                f"--signal-seconds {self.signal_seconds}: leaves nothing of --time {self.time} to train in, as Slurm"
                f" may signal {EARLY} seconds earlier"
            )

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ntasks_per_node

    def options(self) -> list[str]:
        """Of sbatch, as the script gives them."""
        named = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": self.ntasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "signal": f"B:USR1@{self.signal_seconds}",
        }
        given = [f"{name}={value}" for name, value in named.items() if value is not None]
        return [*given, *self.more, "requeue", "open-mode=append", "output=%x-%j.log"]


def write(job: Job, config: Config, flags: list[str], argv: list[str]) -> str:
    """The script that trains with `flags`, which ask for `config`; `argv` is what `submit` was told."""
    for word in (*argv, *flags):
        if not word.isprintable():
            raise UsageError(f"{word!r}: a job script cannot hold it")
    threads = "" if config.threads else '--threads "$THREADS" '
    train = f"{COMMAND} {threads}{shlex.join([*added(config), *flags])}"
    other = "mpirun" if job.launcher == "srun" else "srun"
    texts = {"srun": SRUN, "mpirun": MPIRUN}
    start = texts[job.launcher].format(mark="", train=train)
    instead = texts[other].format(mark="# ", train=train)
    return SCRIPT.format(
        written_by=shlex.join(["python", "-m", "hpctrain", "submit", *argv]),
        layout=layout(config, job.num_ranks),
        options="\n".join(f"#SBATCH --{option}" for option in job.options()),
        ntasks=job.ntasks_per_node,
        seconds=job.signal_seconds,
        start=f"{start}\n{HINTS[job.launcher]}\n{instead}",
    )


def in_seconds(time: str) -> int:
    """A time limit as sbatch reads it: minutes, M:S, H:M:S, or behind D- hours, H:M and H:M:S. UsageError."""
    match = TIME.fullmatch(time)
    if not match:
        raise UsageError(f"--time {time}: expected minutes, H:M:S or D-H:M:S, such as 4:00:00")
    days, *parts = (part and int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is None:
        units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(given)]
    else:
        units = (3600, 60, 1)
    return 86400 * (days or 0) + sum(part * unit for part, unit in zip(given, units))
