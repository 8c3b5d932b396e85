"""Pictures of a test's own in folders and arrays, and the lines with which they are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from hpctrain.tasks.images import Images
from hpctrain.tasks.storage import DataError

RANDOM = np.random.default_rng(3)


def pixels(*shape) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def save_picture(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def class_folder(folder: Path, arrays, suffix=".png") -> list[Path]:
    return [save_picture(folder / f"{number:03}{suffix}", array) for number, array in enumerate(arrays)]


def two_classes(root: Path, count=12, size=32) -> dict[str, np.ndarray]:
    arrays = {name: pixels(count, size, size, 3) for name in ("ant", "bee")}
    for name, pictures in arrays.items():
        class_folder(root / name, pictures)
    return arrays


def save_npz(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def items(task: Images, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    dataset = task.dataset(split)
    return default_collate([dataset[index] for index in range(len(dataset))])


def refusal(path, **options) -> str:
    """The line with which `path` is refused, without its beginning."""
    with pytest.raises(DataError) as caught:
        Images(data=str(path), **options).prepare()
    return told(caught.value, path)


def told(error: DataError, path) -> str:
    prefix = f"--data {path}: "
    assert str(error).startswith(prefix) and "\n" not in str(error), error
    return str(error).removeprefix(prefix)
