"""metrics.jsonl: one JSON object a line, so that a run which was killed leaves all its steps but the one in writing.

JSON has no NaN and no infinity, and readers in other languages refuse them; they are written as null.
"""

import json
import math
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends to `path`, each line flushed. What a killed run left of an unfinished line is cut off first, and lines
    behind those of step `last`, so that a run which goes on from there writes each step once.
    """

    def __init__(self, path: str | Path, last: float = math.inf):
        self._file = Path(path).open("ab")  # noqa: SIM115 - open for as long as the run lasts
        end, self.last_step = _kept(last, Path(path))
        self._file.truncate(end)

    def write(self, line: dict[str, Any]) -> None:
        """Adds one object; its values are what JSON has: numbers, text, bool, None, and lists and dicts of these.
        OSError, with the file's name, where there is no room.
        """
        try:
            self._file.write((json.dumps(finite(line), allow_nan=False) + "\n").encode())
            self._file.flush()
        except OSError as error:
            error.filename = str(self._file.name)
            raise

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a metrics file in order, without an unfinished last line. ValueError names file and line."""
    *lines, _ = Path(path).read_bytes().split(b"\n")
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            objects.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    return objects


def finite(value: Any) -> Any:
    """`value` with None in place of NaN and infinity, in lists and dicts too."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kept(step: float, path: Path) -> tuple[int, int]:
    """Bytes before the first line of a later step, or before one that is no such line, as a killed run may leave it;
    and the step of the line before that, 0 where there is none.
    """
    end = last = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or (found := json.loads(line)["step"]) > step:
                    break
            except (ValueError, TypeError, KeyError):
                break
            end, last = end + len(line), found
    return end, last
