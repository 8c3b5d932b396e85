"""Ways to change a checkpoint: by accident, by who writes its sha256 anew, and such that nothing has changed."""

from __future__ import annotations

import copy
import json
import os
import random
import reprlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hpctrain.train import checkpoint_files as files
from hpctrain.train.checkpoint_pieces import DTYPES

STRANGE = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**62, 2**63, -(2**63), 10**30, 10**4000, 0.5, -1e308, 1e308),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "inf",
        "../manifest.json",
        "/etc/passwd",
        "a\0b",
        "a\nb",
        "\ud800",
        "x" * 9999,
    ),
    *(
        [],
        {},
        [0],
        [-1],
        [2**62, 2**62],
        [0, 2**62, 2**62],
        {"a": 1},
        [[1]],
        "float16",
        "int64",
        "rank-0001.safetensors",
    ),
)


OFTEN = {"contents": 8, "files": 3, "config": 2, "state": 2}  # what has most in it


def damaged_bytes(folder: Path, rng: random.Random) -> str:
    """A byte of a file is another one, too many or not there, or the file's end is missing."""
    path = rng.choice(sorted(folder.iterdir()))
    content, kind = path.read_bytes(), rng.randrange(4)
    place = rng.randrange(len(content))
    middle = (b"", bytes([content[place] ^ rng.randrange(1, 256)]), bytes([rng.randrange(256), content[place]]), b"")[
        kind
    ]
    path.write_bytes(content[:place] + middle + (b"" if kind == 3 else content[place + 1 :]))
    return f"byte {place} of {path.name}"


def forged_manifest(folder: Path, rng: random.Random) -> str:
    """Something in the manifest is something else, twice there, or not there, and its sha256 is right."""
    manifest = json.loads((folder / files.MANIFEST).read_bytes())
    del manifest["sha256"]
    told = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        told.append(changed(manifest, rng))
    seal(folder, manifest)
    return ", ".join(told)


def changed(manifest: dict, rng: random.Random) -> str:
    """Changes one place of it; which, and how."""
    holder, path = manifest, []
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return f"{path} is empty"
        weights = [OFTEN.get(key, 1) if holder is manifest else 1 for key in keys]
        path.append(rng.choices(keys, weights)[0])
        value = holder[path[-1]]
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.2:
            break
        holder = value
    key, kind = path[-1], rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.append(copy.deepcopy(value))
    elif kind == 2 and isinstance(value, (int, float)):
        holder[key] = value + rng.choice((-1, 1, 0.5, -(2**40), 2**40))
    elif kind == 3 and isinstance(value, str) and value in DTYPES:
        holder[key] = rng.choice(list(DTYPES))
    elif kind == 4:
        holder[key] = nested(value, rng.choice((2, 40, 200)))
    else:
        holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return f"{path} by {kind}: {reprlib.repr(holder.get(key) if isinstance(holder, dict) else holder)}"


def nested(value, depth: int):
    for _ in range(depth):
        value = [value]
    return value


def seal(folder: Path, manifest: dict) -> None:
    """As the package does, with whatever is in it."""
    (folder / files.MANIFEST).write_text(json.dumps({**manifest, "sha256": files._digest(manifest)}))


def forged_tensors(folder: Path, rng: random.Random) -> str:
    """A file holds other tensors, or other bytes, and the manifest has its sha256."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    tensors, kind = load_file(path), rng.randrange(6)
    name = rng.choice(sorted(tensors))
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = tensors[name].to(rng.choice([*DTYPES.values(), torch.complex64, torch.float8_e4m3fn]))
    elif kind == 2:
        tensors[name] = torch.zeros(rng.choice([(), (0,), (1,), (3, 5), (1000,)]), dtype=tensors[name].dtype)
    elif kind == 3:
        tensors["more/of it"] = torch.zeros(3)
    if kind < 4:
        save_file(tensors, path)
    else:
        damaged_in_place(path, rng)
    manifest = json.loads((folder / files.MANIFEST).read_bytes())
    del manifest["sha256"]
    (listed,) = [each for each in manifest["files"] if each["name"] == path.name]
    listed |= {"bytes": path.stat().st_size, "sha256": files.sha256_of(path)}
    seal(folder, manifest)
    return f"{path.name} by {kind}: {name}"


def damaged_in_place(path: Path, rng: random.Random) -> None:
    """In the first bytes most often, which say what the others are."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3))):
        content[rng.randrange(rng.choice((8, 300, len(content))))] = rng.randrange(256)
    path.write_bytes(content[: rng.choice((len(content), len(content), rng.randrange(len(content))))])


def harmless(folder: Path, rng: random.Random) -> str:
    """What changes nothing of what was saved."""
    kind, path = rng.randrange(3), folder / files.MANIFEST
    if kind == 0:
        (folder / f"note-{rng.randrange(9)}.txt").write_text("somebody's")
    elif kind == 1:
        os.utime(path, (1, 1))
    else:
        path.write_text(json.dumps(json.loads(path.read_bytes()), indent=rng.randrange(1, 5)))
    return f"harmless {kind}"


WAYS = {damaged_bytes: 2, forged_manifest: 5, forged_tensors: 2, harmless: 1}  # and how often
