"""A run's folder, read again: its configuration and its weights."""

from dataclasses import replace
from pathlib import Path

from hpctrain.config import Config, UsageError, read_toml


def read_config(folder: Path) -> Config:
    """What really ran. UsageError where `folder` is no finished run's."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; name that of a finished run, such as runs/text-20300101-120000")
    for name in ("config.toml", "model.safetensors"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: no finished run, it has no {name}")
    settings = read_toml(str(folder / "config.toml"))
    return replace(Config(**settings), loader_workers=0)


def load_weights(tensors: dict, folder: Path) -> None:
    """Fills `tensors`, a stage's state by global name, from the run's file. UsageError names what does not fit."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: damaged, or no safetensors file: {error}") from None
    described = [{f"{name} {tuple(tensor.shape)}" for name, tensor in each.items()} for each in (tensors, saved)]
    if described[0] != described[1]:
        first = sorted(described[0] ^ described[1])[0]
        where = "only in the file" if first in described[1] else "only in the model that the task builds"
        raise UsageError(f"{path}: other weights than the task's: {first} is {where}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
