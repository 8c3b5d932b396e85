"""What a wheel must hold, seen from the checkout: python -m tests.harness.wheel dist/hpctrain-*.whl"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def wanted(root: Path = ROOT) -> list[str]:
    """The ends of the paths that a wheel of `root` has: modules, job scripts, benchmarks."""
    modules = list((root / "hpctrain").rglob("*.py"))
    shared = [path for folder in ("jobs", "benchmarks") for path in (root / folder).rglob("*") if path.is_file()]
    places = [path.relative_to(root).as_posix() for path in modules]
    places += [f".data/data/share/hpctrain/{path.relative_to(root).as_posix()}" for path in shared]
    return sorted(place for place in places if "/." not in place and "__pycache__" not in place)


def faults(names: list[str], places: list[str]) -> list[str]:
    """What a wheel with the files `names` lacks of `places`, and what it has beside them and its metadata."""
    held = {name[name.index(".data/") :] if ".data/" in name else name for name in names if ".dist-info/" not in name}
    lacks, has = sorted(set(places) - held), sorted(held - set(places))
    return [f"it lacks {place}" for place in lacks] + [f"it has {place} too much" for place in has]


if __name__ == "__main__":
    (wheel,) = sys.argv[1:]
    if found := faults(zipfile.ZipFile(wheel).namelist(), wanted()):
        sys.exit("\n".join(f"{wheel}: {fault}" for fault in found))
    print(f"{wheel}: {len(wanted())} files, as it should be")
