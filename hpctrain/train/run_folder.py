"""The folder of a run: a new one, or one that a run goes on in, of which nothing is touched before it does."""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.comm.group import Group
from hpctrain.config import Config, UsageError, to_toml
from hpctrain.tasks.load import short_name
from hpctrain.train import checkpoint_files as files
from hpctrain.train.layout import grid_of
from hpctrain.train.resume import CHECKPOINTS, CONFIG, default_folder

WAIT_SECONDS = 60
RANKS = "logs/ranks.txt"


def make_run_folder(config: Config) -> Path:
    """A new folder: `--run-dir`, or runs/TASK-TIME (in a Slurm job runs/TASK-JOB). Never one that exists."""
    wanted = default_folder(config) or f"runs/{short_name(config.task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [Path(wanted)] + ([] if config.run_dir else [Path(f"{wanted}-{i}") for i in range(2, 100)])
    for folder in candidates:
        try:
            folder.mkdir(parents=True)
            return folder.absolute()
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"--run-dir {folder}: {error.strerror}") from None
    may_go_on = "; --resume auto goes on with it" if Path(wanted, CONFIG).exists() else ""
    raise UsageError(f"--run-dir {wanted}: exists already; name a new folder{may_go_on}")


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Holds the folder of a run for this process, while it lives. UsageError where another run stays in it.

    It is the file config.toml that is locked. A run that lost its node may hold it for as long as the file system takes
    to notice. One that knows no locks holds nothing.
    """
    if folder is None:
        yield
        return
    with (folder / CONFIG).open("a") as file:
        if not _locked(file):
            print(
                f"note: --run-dir {folder}: another run is in it; waits {WAIT_SECONDS} s for its end", file=sys.stderr
            )
            _wait_for(file, folder)
        yield


def _wait_for(file, folder: Path) -> None:
    """Until the other run has gone. UsageError."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not _locked(file):
        if time.monotonic() > deadline:
            raise UsageError(f"--run-dir {folder}: another run is in it; wait for its end, or name another folder")
        time.sleep(1)


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # as far as can be known
    return True


def write_config(config: Config, folder: Path, num_ranks: int) -> None:
    """What really runs."""
    grid = grid_of(config, num_ranks)
    servers = f", servers {config.servers}" if config.servers else ""
    layout = f"# stages x replicas: {grid.num_stages} x {grid.num_replicas}{servers}\n"
    (folder / CONFIG).write_text(layout + to_toml(config), encoding="utf-8")


def take_over(folder: Path, step: int) -> None:
    """Of a run that goes on in `folder` from `step`: it is not done any more, checkpoints that it went back behind are
    set aside, and so are the figures of one that begins again.
    """
    (folder / "summary.json").unlink(missing_ok=True)
    for later in files.newest_first(folder / CHECKPOINTS):
        if int(later.name.removeprefix("step-")) > step:
            later.rename(_free(later.with_name(f"{later.name}.skipped")))
    metrics = folder / "metrics.jsonl"
    if step == 0 and metrics.exists() and metrics.stat().st_size:
        before = metrics.rename(_free(folder / "metrics-before.jsonl"))
        print(f"note: --resume auto: what was noted before is in {before}", file=sys.stderr)


def note_processes(folder: Path, world: Group) -> None:
    """Which process each rank is: launchers, and the kernel where memory runs out, tell of processes. Collective."""
    told = world.all_gather_json(f"process {os.getpid()} on {socket.gethostname()}")
    if world.rank == 0:
        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}: a launch of {len(told)} ranks"]
        lines += [f"rank {rank}: {process}" for rank, process in enumerate(told)]
        with suppress(OSError):  # a full disk: those who write what matters tell of it
            (folder / "logs").mkdir(exist_ok=True)
            with (folder / RANKS).open("a", encoding="utf-8") as file:
                file.write("\n".join([*lines, ""]))


def _free(path: Path) -> Path:
    """That, or with a number behind it the first one that nobody has."""
    candidates = (path.with_name(f"{path.name}.{number}") for number in range(1, 10**6))
    return path if not path.exists() else next(each for each in candidates if not each.exists())
