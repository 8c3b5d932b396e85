"""A file that a command writes: a new one, whole or not at all, and never in place of somebody's."""

import os
from pathlib import Path
from typing import Any

from hpctrain.config import UsageError
from hpctrain.report.summary import write_json


def check_new(out: Path) -> None:
    """UsageError where there is something of this name already, or no folder for it."""
    if os.path.lexists(out) or not out.parent.is_dir():
        raise UsageError(f"{out}: " + ("exists already; name a new file" if os.path.lexists(out) else "no such folder"))


def write_new(out: Path, values: dict[str, Any]) -> str | None:
    """What is wrong, if anything. Measuring takes a while, in which the file may have come into being."""
    try:
        check_new(out)
        write_json(out, values)
    except UsageError as error:
        return str(error)
    except OSError as error:
        return f"{out}: {error.strerror or error}"
    return None
