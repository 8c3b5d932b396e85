"""Ends a job in which no rank gets on any more, and says which rank it probably waits for.

Each rank has a thread that sees whether the rank begins anything. One that has not for a while writes what it is doing
into a file of the run's folder; the others see it and write theirs, also those that are well, and then nothing has
happened. Files, not messages: what keeps the ranks may well be MPI, or the network. A rank that writes nothing is
stopped or lost, or its host is.
"""

import faulthandler
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpctrain.comm.progress import Progress

STALLED = 76  # exit code
GATHER_SECONDS = 2.0  # for the others to write what they are doing
PATIENCE = 3.0  # seconds more, for the rank that is to end the job
PATIENT_SHARE = 0.1  # of the seconds counts, where a rank may take longer: even a disk is gone some time


class Report(NamedTuple):
    """What a rank was doing for how many seconds, and for which ranks it waited (none: it was busy by itself)."""

    rank: int
    seconds: float
    doing: str
    waits_for: Sequence[int] = ()

    def __str__(self):
        where = f", waits for {ranks_named(self.waits_for)}" if self.waits_for else ""
        return f"rank {self.rank}: for {self.seconds:.0f} s in {self.doing}{where}"


class Watchdog:
    """Of this rank, of `size` in all, inside a with. `describe(doing)` makes words of what the progress has
    begun, and names the ranks that it waits for. `end()` is called when all are stalled;
    one that does not `begins` leaves it to others to say so first.
    """

    def __init__(
        self,
        progress: Progress,
        seconds: float,
        folder: Path,
        rank: int,
        size: int,
        describe: Callable[[object], tuple[str, Sequence[int]]],
        end: Callable[[], None],
        begins: bool = True,
    ):
        self._progress, self._limit, self._folder, self._rank, self._size = progress, seconds, folder, rank, size
        self._describe, self._end, self._begins = describe, end, begins
        self._every = min(1.0, seconds / 4)
        self._idle, self._seen = 0.0, -1
        self._told: float | None = None  # when this rank wrote that it is stalled
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._limit != math.inf:
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._every):
            now = time.monotonic()
            self._look(min(now - before, 2 * self._every))  # a process that was stopped itself has not waited
            before = now

    def _look(self, elapsed: float) -> None:
        """One look, `elapsed` seconds after the last one."""
        begun = self._progress.num_begun
        counts = elapsed * PATIENT_SHARE if self._progress.is_patient else elapsed
        self._idle = self._idle + counts if begun == self._seen else 0.0
        self._seen = begun
        if self._idle < self._limit:
            self._told = None
        elif self._told is None and self._begins:
            self._told = time.monotonic()
            print(f"hpctrain: no progress: {self._report()}", file=sys.stderr, flush=True)
        if self._told is not None:
            self._write()
            self._decide(time.monotonic() - self._told)
        elif any(each.rank != self._rank and each.seconds >= self._limit for each in self._reports()):
            self._write()
        else:
            self._file(self._rank).unlink(missing_ok=True)

    def _decide(self, waited: float) -> None:
        """Nothing, until the others have had time to write, and while one of them gets on."""
        reports = self._reports()
        if waited < GATHER_SECONDS + 2 * self._every or any(each.seconds < self._limit for each in reports):
            return
        if not any(each.rank == self._rank for each in reports):
            return  # nobody can read what this rank writes: it knows too little
        if reports[0].rank == self._rank:
            print("\n".join(f"hpctrain: {line}" for line in table(reports, self._size)), file=sys.stderr, flush=True)
            self._end()
        elif waited > GATHER_SECONDS + 2 * self._every + PATIENCE:
            self._end()

    def _report(self) -> Report:
        doing, waits_for = self._describe(self._progress.doing)
        doing += ", of whose seconds a tenth counts" if self._progress.is_patient else ""
        return Report(self._rank, self._idle, doing, list(waits_for))

    def _write(self) -> None:
        """What this rank is doing: a line, the same as JSON, and where in the program its threads are."""
        report = self._report()
        file = self._file(self._rank)
        part = file.with_suffix(".part")
        try:
            with part.open("w", encoding="utf-8") as stream:
                stream.write(f"{report}\n{json.dumps(report)}\n")
                stream.flush()
                faulthandler.dump_traceback(stream, all_threads=True)
            part.replace(file)
        except OSError:
            pass  # a full disk: the line on standard error says it too

    def _reports(self) -> list[Report]:
        """All that can be read now."""
        found = []
        for file in self._folder.glob("stall-*.txt"):
            try:
                found.append(Report(*json.loads(file.read_text(encoding="utf-8").split("\n")[1])))
            except (OSError, ValueError, IndexError, TypeError):
                continue
        return sorted(each for each in found if each.rank < self._size)

    def _file(self, rank: int) -> Path:
        return self._folder / f"stall-{rank:04d}.txt"


def table(reports: Sequence[Report], size: int) -> list[str]:
    """A line for each rank, then the one that all probably wait for."""
    known = {each.rank: each for each in reports}
    lines = [str(known.get(rank, f"rank {rank}: has written nothing; stopped or lost?")) for rank in range(size)]
    return ["stalled: no rank has made progress", *lines, f"likely culprit: {culprit(known, size)}"]


def culprit(known: dict[int, Report], size: int) -> str:
    """Who has not written; else who waits for nobody; else who is waited for most."""
    silent = [rank for rank in range(size) if rank not in known]
    busy = [rank for rank, each in known.items() if not each.waits_for]
    if silent or busy:
        return ranks_named(silent or busy)
    waited_for = [rank for each in known.values() for rank in each.waits_for]
    most = max(map(waited_for.count, waited_for))
    return ranks_named(sorted({rank for rank in waited_for if waited_for.count(rank) == most}))


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 4`; many are counted."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
