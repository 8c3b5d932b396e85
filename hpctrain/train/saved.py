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
    try:
        return replace(Config(**read_toml(str(folder / "config.toml"))), loader_workers=0)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--config ")) from None


def read_weights(folder: Path) -> tuple[dict, dict[str, str]]:
    """The run's tensors by global name, and the notes in their file. UsageError where it is damaged."""
    from safetensors import SafetensorError, safe_open

    path = folder / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: damaged, or no safetensors file: {error}") from None


def load_weights(tensors: dict, folder: Path) -> None:
    """Fills `tensors`, a stage's state by global name, from the run's file. UsageError names what does not fit."""
    import torch

    saved, _ = read_weights(folder)
    described = [{f"{name} {tuple(tensor.shape)}" for name, tensor in each.items()} for each in (tensors, saved)]
    if described[0] != described[1]:
        first = sorted(described[0] ^ described[1])[0]
        where = "only in the file" if first in described[1] else "only in the model that the task builds"
        raise UsageError(f"{folder / 'model.safetensors'}: other weights than the task's: {first} is {where}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
