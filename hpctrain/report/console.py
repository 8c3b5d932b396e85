"""What the user sees of a run while it lasts, and of its end. Only the rank that prints builds a ProgressLine.

On a terminal one line stays in place and changes. A log file or a pipe, which is what a batch job and mpirun give,
would keep every change, so there the run leaves at most 21 plain lines. Rich draws; the rank that prints imports it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from hpctrain.report.summary import table_rows

PLAIN_LINES = 20
REFRESH_SECONDS = 0.1


class ProgressLine:
    """Shows the steps of a run of `num_steps` on `stream` (standard output).

    `launched`: by mpirun or srun, which may hand a rank a terminal that nobody looks at; then plain lines.
    """

    def __init__(self, num_steps: int, stream: TextIO | None = None, *, launched: bool = False):
        self.num_steps = num_steps
        self._rows = self._seconds = 0.0
        self._num_updates = 0
        stream = stream or sys.stdout
        on_terminal = stream.isatty() and not launched and os.environ.get("TERM") != "dumb"
        self._display = _LiveLine(num_steps, stream) if on_terminal else _PlainLines(num_steps, stream)

    def update(self, line: dict[str, Any]) -> None:
        """After each step: `line` has step (from 1), loss (None where skipped), seconds and rows_per_second."""
        self._num_updates += 1
        self._seconds += line["seconds"]
        self._rows += line["rows_per_second"] * line["seconds"]
        self._display.show(line["step"], self._describe(line["step"], line["loss"]))

    def evaluated(self, line: dict[str, Any]) -> None:
        """After an evaluation: `line` has step and eval, {name: value}. It leaves a line that stays."""
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in line["eval"].items())
        self.say(f"step {line['step']:{len(str(self.num_steps))}}/{self.num_steps}  held-out {metrics}")

    def say(self, text: str) -> None:
        """A line that stays, above the living one."""
        self._display.say(text)

    def close(self) -> None:
        """Ends the live line; what is printed afterwards stands below it."""
        self._display.close()

    def _describe(self, step: int, loss: float | None) -> str:
        """Speed and time left are by the mean over the steps so far."""
        shown = "  -   " if loss is None else f"{loss:.4f}"
        speed = self._rows / self._seconds if self._seconds else 0.0
        left = round((self.num_steps - step) * self._seconds / self._num_updates)
        hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
        width = len(str(self.num_steps))
        clock = f"{hours}:{minutes:02}:{seconds:02}"
        return f"step {step:{width}}/{self.num_steps}  loss {shown}  {speed:.1f} rows/s  {clock} left"


class _PlainLines:
    """The first step, and a line each time that another twentieth of the run is done; so the last step as well."""

    def __init__(self, num_steps: int, stream: TextIO):
        self._num_steps, self._stream = num_steps, stream
        self._twentieths: int | None = None

    def show(self, step: int, text: str) -> None:
        twentieths = step * PLAIN_LINES // self._num_steps
        if twentieths != self._twentieths:
            self._twentieths = twentieths
            self.say(text)

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _LiveLine:
    """A bar and the text, drawn anew at most ten times a second and for the last step. Starts no thread."""

    def __init__(self, num_steps: int, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(file=stream, force_terminal=True)
        columns = BarColumn(bar_width=16), TextColumn("{task.description}", markup=False)
        self._bar = Bar(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._row = self._bar.add_task("", total=num_steps)
        self._bar.start()
        console.show_cursor(True)  # a run that is killed must not leave a terminal without one
        self._drawn = -REFRESH_SECONDS

    def show(self, step: int, text: str) -> None:
        self._bar.update(self._row, completed=step, description=text)
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._bar.refresh()
            self._drawn = time.monotonic()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        self._bar.refresh()
        self._bar.stop()


def print_closing(
    summary: dict[str, Any], folder: str | Path, stream: TextIO | None = None, *, launched: bool = False
) -> None:
    """The table of a finished run, and where its files lie. `launched` as for ProgressLine."""
    from rich.console import Console
    from rich.table import Table

    stream = stream or sys.stdout
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in table_rows(summary):
        table.add_row(*row)
    plain = {"force_terminal": False} if launched else {}
    Console(file=stream, markup=False, highlight=False, emoji=False, **plain).print(table)
    print(f"files in {folder}", file=stream, flush=True)  # not in the table, which would break a long path
