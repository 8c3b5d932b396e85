"""Weights by global name: their fingerprint and their file."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch


def fingerprints(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """A line a tensor, in name order: name, dtype, shape, sha256 of its little-endian bytes."""
    lines = []
    for name, tensor in sorted(parameters.items()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{name} {dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}")
    return lines


def combined(lines: list[str]) -> str:
    """One sha256 over fingerprint lines, whoever owned the tensors."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def save_weights(tensors: Mapping[str, torch.Tensor], path: Path, notes: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file under a temporary name, flushes it, then gives it its own: it is whole or not there.

    `notes` are texts in the file's header.
    """
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".part")
    whole, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        whole[name] = tensor.clone() if storage in storages else tensor  # safetensors refuses shared memory
        storages.add(storage)
    save_file(whole, temporary, {"format": "pt", **(notes or {})})
    os.umask(umask := os.umask(0))
    temporary.chmod(0o666 & ~umask)  # safetensors writes for the owner alone
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.rename(path)
