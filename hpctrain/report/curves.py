"""The figures of metrics.jsonl as an event file that TensorBoard draws. Needs the package tensorboard, not torch."""

import math
import time
from pathlib import Path
from typing import Any

STEP_TAGS = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "rows_per_second": "speed/rows_per_second",
    "seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
}


class Curves:
    """Writes into `folder`. Points behind step `last` that it has are shown no more: they will be made again."""

    def __init__(self, folder: Path, last: int = 0):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        if last:
            begins = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=last + 1, session_log=begins))

    def add(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl; what is None or not finite has no point on its curve."""
        if "eval" in line:
            values = {f"eval/{name}": value for name, value in line["eval"].items()}
        else:
            values = {tag: line[key] for key, tag in STEP_TAGS.items() if key in line}
        points = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if value is not None and math.isfinite(value)
        ]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=line["step"], summary=self._summary(value=points))
        )

    def close(self) -> None:
        self._writer.close()
