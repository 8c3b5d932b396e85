"""What rank 0 notes of each step and evaluation: a line in metrics.jsonl, the console, and curves where wanted."""

from pathlib import Path
from typing import Any

from hpctrain.report.console import ProgressLine
from hpctrain.report.curves import Curves
from hpctrain.report.metrics import MetricsFile


class Recorder:
    """Of a run of `num_steps` into `folder`; `launched` as for ProgressLine."""

    def __init__(self, folder: Path, num_steps: int, launched: bool, tensorboard: bool = False):
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._progress = ProgressLine(num_steps, launched=launched)
        self._curves = Curves(folder / "tensorboard") if tensorboard else None

    def note(self, line: dict[str, Any]) -> None:
        """`line` is that of a step, or of an evaluation: step, eval {name: value}, seconds."""
        self._metrics.write(line)
        if "eval" in line:
            self._progress.evaluated(line)
        else:
            self._progress.update(line)
        if self._curves:
            self._curves.add(line)

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        if self._curves:
            self._curves.close()
