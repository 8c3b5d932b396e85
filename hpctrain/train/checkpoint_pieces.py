"""Tensors of a checkpoint by name, wherever they are cut: what ranks hold of one is written in pieces, and read whole.

A piece is a range of a tensor's numbers, in their flat order; a whole tensor is one piece. So a layout may be saved by
other ranks than those that load it.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain.train.checkpoint_files import MANIFEST, CheckpointError, File, files_of, read_manifest

DTYPES = {str(each).removeprefix("torch."): each for each in (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)}  # fmt: skip


class Piece(NamedTuple):
    """`values` are the numbers from `start` on of the tensor `key` of `shape`."""

    key: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor

    @classmethod
    def whole(cls, key: str, tensor: torch.Tensor) -> "Piece":
        return cls(key, tuple(tensor.shape), 0, tensor)

    @property
    def is_whole(self) -> bool:
        return self.values.numel() == math.prod(self.shape)

    @property
    def name(self) -> str:
        """In its file."""
        return self.key if self.is_whole else f"{self.key}@{self.start}"


def stored(pieces: Iterable[Piece]) -> dict[str, torch.Tensor]:
    """Copies on the host as safetensors wants them: contiguous, each in its own memory; whole ones in their shape."""
    return {
        each.name: each.values.detach()
        .reshape(each.shape if each.is_whole else -1)
        .to("cpu", copy=True, memory_format=torch.contiguous_format)
        for each in pieces
    }


def described(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """What the manifest has of the pieces in one file."""
    return [
        {
            "key": each.key,
            "dtype": str(each.values.dtype).removeprefix("torch."),
            "shape": list(each.shape),
            "start": each.start,
            "stop": each.start + each.values.numel(),
        }
        for each in pieces
    ]


class Place(NamedTuple):
    """Where the numbers [start, stop) of a tensor are."""

    start: int
    stop: int
    file: str
    name: str


class Saved(NamedTuple):
    """A tensor as a checkpoint has it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: list[Place]


def index(folder: Path, files: list[File], contents: Any) -> dict[str, Saved]:
    """All tensors by key; `contents` is what the manifest has of each file's pieces.

    CheckpointError where that is not what `described` gave, or where a tensor is not there from end to end.
    """
    where = folder / MANIFEST
    if not isinstance(contents, list) or len(contents) != len(files):
        raise CheckpointError(f"{where}: damaged, contents: a list for each of {len(files)} files is expected")
    found: dict[str, Saved] = {}
    nbytes: dict[str, int] = defaultdict(int)
    for file, listed in zip(files, contents):
        for each in listed if isinstance(listed, list) else [None]:
            key, saved = _read(where, file.name, each)
            known = found.setdefault(key, saved)
            if known is not saved:
                if known[:2] != saved[:2]:
                    raise CheckpointError(f"{where}: damaged, {key[:80]} has several shapes or dtypes")
                known.places.extend(saved.places)
            nbytes[file.name] += (saved.places[-1].stop - saved.places[-1].start) * saved.dtype.itemsize
            if nbytes[file.name] > file.nbytes:
                raise CheckpointError(f"{where}: damaged, contents: {file.name} has not so many bytes")
    for key, saved in found.items():
        saved.places.sort()
        ends = [0, *(place.stop for place in saved.places)]
        if [place.start for place in saved.places] != ends[:-1] or ends[-1] != math.prod(saved.shape):
            raise CheckpointError(f"{where}: damaged, {key[:80]} is not there from end to end, once")
    return found


def _read(where: Path, file: str, each: Any) -> tuple[str, Saved]:
    try:
        key, dtype, shape = each["key"], DTYPES[each["dtype"]], tuple(each["shape"])
        start, stop = each["start"], each["stop"]
        numbers = (*shape, start, stop)
        if not isinstance(key, str) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError
        if not key.isprintable() or start > stop or math.prod(length or 1 for length in shape) >= 2**63:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{where}: damaged, contents: {repr(each)[:80]} describes no tensor") from None
    name = key if (start, stop) == (0, math.prod(shape)) else f"{key}@{start}"
    return key, Saved(dtype, shape, [Place(start, stop, file, name)])


class Tensors(Mapping):
    """The tensors of a checkpoint by key, each read when it is asked for, in the shape that the manifest says."""

    def __init__(self, folder: Path, saved: Mapping[str, Saved]):
        self.folder, self.saved = folder, saved

    def __getitem__(self, key: str) -> torch.Tensor:
        """KeyError where there is none; CheckpointError where a file does not hold what the manifest says."""
        saved = self.saved[key]
        whole = torch.empty(math.prod(saved.shape), dtype=saved.dtype)
        for place in saved.places:
            values = self._read(place)
            if values.dtype != saved.dtype or values.numel() != place.stop - place.start:
                raise CheckpointError(f"{self.folder / place.file}: {place.name[:80]} is not what {MANIFEST} says")
            whole[place.start : place.stop] = values.reshape(-1)
        return whole.view(saved.shape)

    def __iter__(self):
        return iter(self.saved)

    def __len__(self) -> int:
        return len(self.saved)

    def _read(self, place: Place) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path = self.folder / place.file
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(place.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: damaged, or no safetensors file: {' '.join(str(error).split())}") from None


def opened(folder: Path, without: Collection[str] = (), manifest: Mapping[str, Any] | None = None) -> Tensors:
    """Those of a checkpoint that was found whole. `without` what optimizers keep: of the "dense" part, of "tables".
    `manifest`: where it was read already.

    CheckpointError.
    """
    manifest = read_manifest(folder) if manifest is None else manifest
    saved = index(folder, files_of(folder, manifest), manifest["contents"])
    return Tensors(folder, {key: each for key, each in saved.items() if _kept_by(key) not in without})


def _kept_by(key: str) -> str | None:
    """Whose optimizer keeps it; None: nobody's."""
    if key.startswith("optimizer/"):
        return "dense"
    return "tables" if key.startswith("tables/") and not key.endswith(("/ids", "/values")) else None
