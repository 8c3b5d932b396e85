"""An end for tests that hang: stacks of every rank, then the whole launch aborted.

Ranks that wait for each other all reach the limit together, so each one writes its own stacks and the job is aborted
a moment later. The stacks come from a thread; where no Python thread can run any more (an extension holds the
interpreter's lock) faulthandler's own timer writes them instead.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time

STALLED = 76  # the exit code of a run that stood still
GRACE = 2.0  # seconds between the first rank's stacks and the abort, for the other ranks' stacks


class Watchdog:
    """One limit at a time: `arm` starts it, `disarm` ends it. Times in seconds.

    `ranks` is the harness.Ranks to abort; `stderr` the descriptor of the real standard error, which pytest captures.
    `notes` are lines that would be lost with the launch.
    """

    def __init__(self, ranks, stderr: int):
        self._ranks, self._stderr = ranks, stderr
        self._timer = None
        self.notes: list[str] = []

    def arm(self, what: str, seconds: float) -> None:
        self.disarm()
        self._timer = threading.Timer(seconds, self._bark, (what, seconds))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(seconds + GRACE / 2, file=self._stderr)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._timer:
            self._timer.cancel()

    def _bark(self, what: str, seconds: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        lines = [*self.notes, f"{what} took more than {seconds:g} s; the stacks of this rank:", *_stacks()]
        os.write(self._stderr, "".join(f"[rank {self._ranks.rank}] {line}\n" for line in lines).encode())
        time.sleep(GRACE)
        self._ranks.abort(STALLED)


def _stacks() -> list[str]:
    """The stacks of all threads but this one, without the frames of pytest itself."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().split("\n\n")
    lines = "\n".join(thread for thread in threads if not thread.startswith("Current thread")).splitlines()
    return [line for line in lines if not any(name in line for name in ("/_pytest/", "/pluggy/", "/pytest/", "runpy>"))]
