"""A run that goes on without the ranks that it loses: those that are left come together again, and train on.

Whoever is lost takes nothing along that others do not have: replicas hold the same weights, and servers hold those that
workers push to. So nothing is saved for it and nothing read again. The ranks that are left build themselves anew, as
many as they are, from what they hold of the last step that all agree on (regain.py), and share out the rows of the next
one. A lost server, which held what nobody else has, ends the run with code 77; its checkpoints are there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.comm import abort
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import duplicate
from hpctrain.comm.progress import Progress
from hpctrain.comm.survivors import Survivors
from hpctrain.comm.watchdog import Watchdog
from hpctrain.config import UsageError
from hpctrain.report.streams import PrefixedStream
from hpctrain.train.resume import Start
from hpctrain.train.run_folder import alone_in

if TYPE_CHECKING:
    from hpctrain.report.recorder import Recorder
    from hpctrain.train.background import Background
    from hpctrain.train.shard import Shard
    from hpctrain.train.train_state import TrainState
    from hpctrain.train.trainer import Trainer


class Survival:
    """Of a launch on `comm`, of whose ranks the last `num_servers` serve. Collective.

    `stall_seconds`: how long those that are left may take to come together, before they are ended as stalled.
    `trainer`: what this worker has come to, `shard`: what this server has; None until it has something.
    """

    def __init__(self, comm, num_servers: int, stall_seconds: float):
        self.survivors, self._num_servers = Survivors(comm), num_servers
        abort.go_on_with(self.survivors.comm)
        self.trainer: Trainer | None = None
        self.recorder: Recorder | None = None  # of rank 0
        self.shard: Shard | None = None
        self.writing: Background | None = None  # of this server
        self.lost: list[int] = []  # by the numbers of the launch
        self._stall_seconds = stall_seconds
        self._serves = [rank >= comm.size - num_servers for rank in range(comm.size)]
        self._holds_folder = comm.rank == 0
        self._kept: list = []  # errors, whose frames hold the memory of messages that may still be on their way

    def progress(self) -> Progress:
        """One that tells of a loss, whatever is waited for."""
        progress = Progress()
        progress.add(self.survivors)
        return progress

    def regain(self, trainer: Trainer) -> TrainState:
        """What the ranks that are left had come to is what `trainer` goes on from. Collective."""
        from hpctrain.train.regain import regain

        state = regain(self.trainer, trainer)
        if trainer.mesh.rank == 0:
            print(f"goes on from step {state.step}, which all ranks that are left have in memory", flush=True)
        return state

    def protect(self, trainer: Trainer) -> None:
        """From here on what this worker has come to outlives the loss of others."""
        before, self.trainer = self.trainer, trainer
        trainer.executor.update.remembers, trainer.lost_ranks = True, list(self.lost)
        if before is not None:
            before.forget()

    def run(self, carry_out: Callable[[Any, Start], int], folder: Path, start: Start, held: ExitStack) -> int:
        """Calls `carry_out` with a communicator of the ranks that are there, until all of them come out of it with the
        exit code. Rank 0 holds the folder of the run.
        """
        start = replace(start, survival=self)
        while True:
            code = None
            try:
                code = carry_out(self.survivors.comm, start)
            except RuntimeError as error:
                if not self.survivors.explain(error):
                    raise
                self._kept.append(error)
            progress = Progress()
            with self._watching(progress, folder) if code is None else nullcontext():
                if self.survivors.all_finished(code is not None):
                    return code
                progress.begin("what is still being written", is_patient=True)
                self._let_go()
                progress.begin("coming together without those that are lost")
                while not self._come_together():
                    pass
            self._tell()
            if sum(self._serves) < self._num_servers or all(self._serves):
                return self._give_up(folder)
            if self.survivors.comm.rank == 0 and not self._holds_folder:
                self._hold(folder, held)
            start = replace(start, folder=folder)

    def _hold(self, folder: Path, held: ExitStack) -> None:
        """A file system that has not noticed yet who was lost is no reason to end."""
        self._holds_folder = True
        try:
            held.enter_context(alone_in(folder))
        except UsageError as error:
            print(f"note: {error}", file=sys.stderr)

    def _watching(self, progress: Progress, folder: Path) -> Watchdog:
        """While ranks come together: one that is stopped, not lost, would keep the others for ever."""
        from hpctrain.train.stall import end

        rank, size = self.survivors.comm.rank, self.survivors.comm.size
        progress.begin("hearing who is lost")
        others = [other for other in range(size) if other != rank]
        return Watchdog(progress, self._stall_seconds, folder, rank, size, lambda doing: (str(doing), others), end)

    def _let_go(self) -> None:
        """Of what was under way, but for the messages."""
        if self.recorder is not None:
            self.recorder.close()
        if self.trainer is not None:
            self.trainer.let_go()
        if self.writing is not None:
            self.writing.wait()
        self.recorder = None

    def _come_together(self) -> bool:
        """False, on all, where another rank was lost meanwhile."""
        before = self.survivors.launched_as
        left = self.survivors.shrink()
        abort.go_on_with(self.survivors.comm)
        self.lost += [before[rank] for rank in range(len(before)) if rank not in left]
        workers = [rank for rank in left if not self._serves[rank]]
        self._serves = [self._serves[rank] for rank in left]
        if self.shard is not None and workers:
            self.shard.keep_workers(workers)
        known = None
        try:
            known = self._who_knows()
        except RuntimeError as error:
            if not self.survivors.explain(error):
                raise
            self._kept.append(error)
        if not self.survivors.all_are(known is not None):
            return False
        if not all(known):  # some had not begun: the run begins again, from its checkpoint where it had one
            self.trainer = self.shard = None
        return True

    def _who_knows(self) -> list[bool]:
        """Of each rank, whether it has something to go on from. Collective."""
        group = Group(duplicate(self.survivors.comm), self.progress())
        return group.all_gather_json(self.trainer is not None or self.shard is not None)

    def _give_up(self, folder: Path) -> int:
        if self.survivors.comm.rank == 0:
            who = "all workers are" if all(self._serves) else "a server, which held what no other rank has, is"
            goes = f"--resume auto --run-dir {folder} goes on from what was saved"
            print(f"hpctrain: {who} lost; {goes}", file=sys.stderr)
        return abort.LOST

    def _tell(self) -> None:
        """Who is lost, and what the others are called from here on."""
        rank, names = self.survivors.comm.rank, self.survivors.launched_as
        if isinstance(sys.stderr, PrefixedStream):
            sys.stderr.prefix = f"[rank {rank}]"
        if rank == 0:
            lost, left = (", ".join(map(str, each)) for each in (self.lost, names))
            number = f"ranks 0 to {len(names) - 1} are" if len(names) > 1 else "rank 0 is"
            word = "ranks" if len(self.lost) > 1 else "rank"
            print(f"note: lost {word} {lost} of the launch; {number} what was {left} there", file=sys.stderr)
