"""Signals that ask a run to leave: it saves all that it is, and ends with a code that says: start me again.

A handler only notes that one came. The ranks agree after a step, so a signal that reaches one of them is enough, and
one that comes while something is saved or evaluated is obeyed when that is over.
"""

import signal
from types import FrameType
from typing import Any

REQUEUE = 75  # exit code of a run that was saved on request: sysexits' EX_TEMPFAIL
ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
PATIENCE = 3  # the SIGINT that is not put off any more: somebody sits there and wants out


class StopSignals:
    """Of this process, from its making until `close`. Only the main thread may make one."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {each: signal.signal(each, self._note) for each in ASKING}

    def was_asked(self) -> bool:
        return self.received is not None

    def close(self) -> None:
        """What a signal did before it does again."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= PATIENCE:
            raise KeyboardInterrupt
