"""What rank 0 notes of each step and evaluation: a line in metrics.jsonl, the console, and curves where wanted."""

from pathlib import Path
from typing import Any

from hpctrain.report.console import ProgressLine
from hpctrain.report.curves import Curves
from hpctrain.report.metrics import MetricsFile


class Recorder:
    """Of a run of `num_steps` into `folder`; `launched` as for ProgressLine. `first`: the step to go on from, where the
    folder may have lines of later ones, which will be made again.
    """

    def __init__(self, folder: Path, num_steps: int, launched: bool, tensorboard: bool = False, first: int = 0):
        self._metrics = MetricsFile(folder / "metrics.jsonl", first)
        self._progress = ProgressLine(num_steps, launched=launched)
        self._curves = Curves(folder / "tensorboard", first) if tensorboard else None
        self._skipped = False

    def note(self, line: dict[str, Any]) -> None:
        """`line` is that of a step; or of an evaluation: step, eval {name: value}, seconds; or of an early stop."""
        self._metrics.write(line)
        if "eval" in line:
            self._progress.evaluated(line)
        elif "stopped_early" in line:
            self._progress.say(f"stopped early: {line['stopped_early']}")
            return
        else:
            self._progress.update(line)
            self._tell_first_skip(line.get("skipped"))
        if self._curves:
            self._curves.add(line)

    def make_up(self, line: dict[str, Any]) -> None:
        """Notes a step, unless whoever noted before has."""
        if line["step"] > self._metrics.last_step:
            self.note(line)

    def _tell_first_skip(self, reason: str | None) -> None:
        if reason and not self._skipped:
            self._skipped = True
            self._progress.say(f"skipped {reason} (this is told once; metrics.jsonl has all)")

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        if self._curves:
            self._curves.close()
