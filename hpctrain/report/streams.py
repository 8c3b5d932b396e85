"""Whose line is it? Eight ranks write to one screen: whole lines, at once, each with its rank in front."""

import io
from pathlib import Path


class PrefixedStream(io.TextIOBase):
    """A text stream that puts `prefix` before each line and writes it whole; also into `log`, once that is set.

    The log file comes into being with the first line, so only ranks that have something to say leave one.
    """

    def __init__(self, stream, prefix: str):
        self._stream, self.prefix = stream, prefix
        self._partial = ""
        self.log: Path | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._write_line(line)
        return len(text)

    def flush(self) -> None:
        if self._partial:
            line, self._partial = self._partial, ""
            self._write_line(line)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def _write_line(self, line: str) -> None:
        line = f"{self.prefix} {line}\n"
        self._stream.write(line)
        self._stream.flush()
        if self.log is not None:
            self._append(self.log, line)

    def _append(self, log: Path, line: str) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError:  # a full disk: the screen has the line, and what it tells of matters more
            self.log = None
