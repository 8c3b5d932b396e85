"""Imported before what may be missing: a package that is not there is one line and exit code 2, not a traceback."""

import sys
from pathlib import Path

CURES = {
    "hpctrain": "pip install it, or export PYTHONPATH=$PWD in the checkout",
    "numpy": "pip install numpy",
    "torch": "pip install torch",
}


def tell(kind, error, trace) -> None:
    """In place of sys.excepthook, until MPI runs and has its own."""
    if not issubclass(kind, ModuleNotFoundError) or error.name not in CURES:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"{Path(sys.argv[0]).name}: {error.name} is not installed; {CURES[error.name]}", file=sys.stderr)
    if error.name != "hpctrain":
        from hpctrain.comm import abort

        abort.leave(2)  # the others may have begun to wait for this rank
    sys.exit(2)


sys.excepthook = tell
