"""`hpctrain files`: the job scripts and benchmarks that came with the package, for those who installed it by pip.

A wheel puts them into `share/hpctrain` of the installation. Where that is depends on how it was installed (into a
virtual environment, with --user, with --target), so it is read from what pip noted down. In a checkout they lie beside
the package, and those there are the ones that are edited.
"""

from __future__ import annotations

import os
import sys
from errno import EEXIST
from importlib import metadata
from pathlib import Path

import hpctrain
from hpctrain.comm import environment

FOLDERS = ("jobs", "benchmarks")
USAGE = "usage: python -m hpctrain files [FOLDER]"


def run(argv: list[str], world) -> int:
    """Prints the files' paths, one a line, or copies them into a folder. Returns 0, 1 where there are none, or 2.

    `argv`: nothing, or the folder. `world` is an mpi4py communicator, None where no MPI was started. Rank 0 acts, and
    all ranks return its code. Collective.
    """
    if world is None:
        return _act(argv) if environment.announced(os.environ).rank in (None, 0) else 0
    from hpctrain.comm.group import Group
    from hpctrain.comm.mesh import duplicate

    group = Group(duplicate(world))
    code = group.broadcast_json(_act(argv) if world.rank == 0 else None)
    group.close()
    return code


def installed() -> dict[str, Path]:
    """Where each file lies, by its place below a folder of one's own (`jobs/env.sh`). Empty: nowhere."""
    package = Path(hpctrain.__file__).resolve().parent
    return _beside(package.parent) or _noted(package.parent)


def copy(files: dict[str, Path], folder: Path) -> None:
    """Copies `files` into `folder`, which is made. FileExistsError before anything is copied, if one is there."""
    for place in files:
        if os.path.lexists(folder / place):
            raise FileExistsError(EEXIST, "exists already; nothing was copied", str(folder / place))
    for place, source in files.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as stream:
            stream.write(source.read_bytes())
        target.chmod(source.stat().st_mode & 0o777 | 0o200)


def _act(argv: list[str]) -> int:
    try:
        if len(argv) > 1 or any(not word or word.startswith("-") for word in argv):
            return _refuse(f"{' '.join(argv)}: not one folder; {USAGE}", 2)
        files = installed()
        if not files:
            return _refuse("the job scripts are not there; reinstall hpctrain by pip, or take jobs/ from its source", 1)
        if argv:
            copy(files, Path(argv[0]))
        for place, source in files.items():
            print(Path(argv[0], place) if argv else source)
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}", 2)
    return 0


def _refuse(message: str, code: int) -> int:
    print(f"hpctrain files: {message}", file=sys.stderr)
    return code


def _beside(root: Path) -> dict[str, Path]:
    """Those of a checkout. A folder `jobs` in site-packages would be somebody else's, and has no setup.py beside it."""
    if not (root / "setup.py").is_file():
        return {}
    found = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file())
    places = {path.relative_to(root).as_posix(): path for path in found}
    return {place: path for place, path in places.items() if not _hidden(place)}


def _noted(site_packages: Path) -> dict[str, Path]:
    """Those of an installation, by what pip noted. pip --target moves files afterwards, to beside the package."""
    try:
        noted = metadata.files("hpctrain") or []
    except metadata.PackageNotFoundError:
        return {}
    files = {}
    for entry in noted:
        place = entry.as_posix().partition("share/hpctrain/")[2]
        moved = site_packages / "share/hpctrain" / place
        there = [path for path in (Path(entry.locate()), moved) if path.is_file()]
        if there and place.split("/")[0] in FOLDERS and not _hidden(place):
            files[place] = there[0].resolve()
    return dict(sorted(files.items()))


def _hidden(place: str) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in place.split("/"))
