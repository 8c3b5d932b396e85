"""A checkpoint on disk: a folder that is whole or not there, and what is looked at before any of it is used.

    checkpoints/step-000040/manifest.json        what the run was, and where each tensor lies
    checkpoints/step-000040/rank-0000.safetensors  the tensors that rank 0 wrote
    checkpoints/latest                           the name of the newest one

Ranks write their files into a folder of a temporary name; when all are on disk rank 0 adds the manifest, with size and
sha256 of each, and renames the folder. Nothing in it is code: JSON and safetensors only.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.report.metrics import finite
from hpctrain.report.summary import write_json

FORMAT = 1
MANIFEST, LATEST = "manifest.json", "latest"
NAME = re.compile(r"step-(\d{6,})")
FIELDS = {"step": int, "state": dict, "layout": dict, "config": dict, "items_seen": list, "contents": list}
FILE_NAME = re.compile(r"[\w-]+\.safetensors", re.ASCII)
MOST_BYTES, MOST_DEEP = 256 << 20, 32  # of a manifest
BLOCK = 1 << 20  # bytes that are hashed at a time


class CheckpointError(ValueError):
    """One line, which names the file and what is wrong with it."""


@dataclass(frozen=True)
class File:
    """One of a checkpoint: its name in the folder, its bytes, their sha256 in hexadecimal."""

    name: str
    nbytes: int
    sha256: str


def name_of(step: int) -> str:
    """Of the folder of a checkpoint after so many steps."""
    return f"step-{step:06d}"


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Any]) -> File:
    """Writes contiguous torch tensors as safetensors, on disk when this returns. OSError where there is no room."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / name
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # also for a full disk, of which it tells the number
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise CheckpointError(f"{path}: {_in_a_line(error)}") from None
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    _flush(path)
    return File(name, path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def begin(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; what an earlier try left there goes."""
    part = root / f".{name_of(step)}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def seal(part: Path, manifest: Mapping[str, Any], files: Iterable[File]) -> Path:
    """Gives the folder its name when all in it is on disk; an older one of that name goes."""
    root, whole = part.parent, part.parent / part.name.removeprefix(".").removesuffix(".part")
    listed = [{"name": each.name, "bytes": each.nbytes, "sha256": each.sha256} for each in files]
    content = finite({"format": FORMAT, **manifest, "files": listed})
    with naming(part / MANIFEST):
        write_json(part / MANIFEST, {**content, "sha256": _digest(content)}, indent=None)
    _flush(part)
    if whole.exists():
        _remove(whole)
    part.rename(whole)
    _flush(root)
    return whole


def note_latest(root: Path, name: str) -> None:
    """Of a whole one."""
    temporary = root / f".{LATEST}"
    with naming(temporary):
        temporary.write_text(f"{name}\n", encoding="utf-8")
    _flush(temporary)
    temporary.replace(root / LATEST)
    _flush(root)


def prune(root: Path, keep: int, newest: Path) -> None:
    """Leaves `keep` checkpoints up to the `newest`, and no folder that was begun and never sealed.

    Those of later steps stay too: they were not whole when the run went back before them, and it will come to them.
    """
    found = newest_first(root)
    for old in found[found.index(newest) + keep :]:
        _remove(old)
    for left in root.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """So that it is never seen half removed."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def newest_first(root: Path) -> list[Path]:
    """Folders that look like checkpoints, by step."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def read_manifest(folder: Path) -> dict[str, Any]:
    """CheckpointError where there is none, or not one that this version can read."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; no whole checkpoint") from None
    if len(content) > MOST_BYTES:
        raise CheckpointError(f"{path}: larger than {MOST_BYTES} bytes, so it is no manifest of hpctrain")
    try:
        manifest = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):  # ValueError also for a number of thousands of digits
        raise CheckpointError(f"{path}: damaged, it is not JSON") from None
    if not _is_plain(manifest, MOST_DEEP):
        raise CheckpointError(f"{path}: damaged, it is too deep, or has a number too large")
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int:
        raise CheckpointError(f"{path}: no checkpoint of hpctrain, it has no format")
    if version != FORMAT:
        raise CheckpointError(f"{path}: of format {version}, and this version reads format {FORMAT}")
    if manifest.pop("sha256", None) != _digest(manifest):
        raise CheckpointError(f"{path}: damaged, its sha256 is not that of what was written")
    for key, kind in FIELDS.items():
        if type(manifest.get(key)) is not kind:
            raise CheckpointError(f"{path}: damaged, it has no {key} of a checkpoint")
    return manifest


def files_of(folder: Path, manifest: Mapping[str, Any]) -> list[File]:
    """What the manifest lists. CheckpointError where that is no list of files in this folder."""
    path, files = folder / MANIFEST, []
    listed = manifest.get("files")
    for each in listed if isinstance(listed, list) else [None]:
        values = [each.get(key) for key in ("name", "bytes", "sha256")] if isinstance(each, dict) else [None]
        if [type(value) for value in values] != [str, int, str]:
            raise CheckpointError(f"{path}: damaged, files: a name, bytes and sha256 are expected of each")
        if not FILE_NAME.fullmatch(values[0]):
            raise CheckpointError(f"{path}: damaged, files: {repr(values[0])[:80]} is not the name of a file beside it")
        files.append(File(*values))
    if len({each.name for each in files}) != len(files):
        raise CheckpointError(f"{path}: damaged, files: a name is there twice")
    return files


def check_file(folder: Path, file: File) -> None:
    """CheckpointError where the file is not, byte for byte, what was written."""
    path = folder / file.name
    try:
        nbytes = path.stat().st_size
        if nbytes != file.nbytes:
            raise CheckpointError(f"{path}: {nbytes} bytes, and {file.nbytes} were written")
        if sha256_of(path) != file.sha256:
            raise CheckpointError(f"{path}: damaged, its sha256 is not that of what was written")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


def _is_plain(value: Any, deep: int) -> bool:
    """Whether it is nested no more than so deep, and its whole numbers have 64 bits."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return deep > 0 and all(_is_plain(each, deep - 1) for each in value)
    return type(value) is not int or -(2**63) <= value < 2**63


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _digest(content: Mapping[str, Any]) -> str:
    """Of what it says, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """What is in a file, or in a folder, is on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError has a file's name: that of a write has none by itself."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
