"""A task whose data have to be prepared: it notes by whom, and fails where it is told to."""

import socket
from dataclasses import dataclass
from pathlib import Path

from tests.train.toys import Masked


@dataclass
class Prepared(Masked):
    folder: str = ""
    fails_on: str = ""

    def prepare(self):
        host = socket.gethostname()
        if host == self.fails_on:
            raise ValueError(f"--data x: no room on the disk of {host}")
        with Path(self.folder, host).open("a") as file:
            file.write("prepared\n")
