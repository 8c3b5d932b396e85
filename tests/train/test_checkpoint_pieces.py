"""Tensors cut in any way are read whole again; a manifest that does not fit its files is told, never half believed."""

import copy
import random

import pytest
import torch

from hpctrain.train import checkpoint_files as files
from hpctrain.train.checkpoint_files import CheckpointError
from hpctrain.train.checkpoint_pieces import Piece, Tensors, described, index, stored

WHOLE = {
    "weights/a": torch.arange(12.0).view(3, 4),
    "weights/b": torch.randn(5, 2).T,  # not contiguous
    "optimizer/a/step": torch.tensor(7.0),
    "tables/t/ids": torch.tensor([3, 1, 2]),
    "weights/none": torch.empty(0, 4),
    "weights/half": torch.randn(7).to(torch.bfloat16),
}


def cut(rng: random.Random) -> list[list[Piece]]:
    """All tensors in pieces, over three files."""
    parts: list[list[Piece]] = [[], [], []]
    for key, tensor in WHOLE.items():
        if tensor.dim() == 0 or tensor.numel() < 3 or rng.random() < 0.3:
            rng.choice(parts).append(Piece.whole(key, tensor))
            continue
        flat = tensor.reshape(-1)
        ends = [0, *sorted(rng.sample(range(1, len(flat)), rng.randrange(1, 3))), len(flat)]
        for start, stop in zip(ends, ends[1:]):
            rng.choice(parts).append(Piece(key, tuple(tensor.shape), start, flat[start:stop]))
    return parts


def write(folder, parts):
    written = [files.write_tensors(folder, f"rank-{n:04d}.safetensors", stored(part)) for n, part in enumerate(parts)]
    return written, [described(part) for part in parts]


@pytest.mark.parametrize("seed", range(20))
def test_however_tensors_are_cut_they_are_read_whole(tmp_path, seed):
    tensors = Tensors(tmp_path, index(tmp_path, *write(tmp_path, cut(random.Random(seed)))))
    assert set(tensors) == set(WHOLE) and len(tensors) == len(WHOLE)
    for key, tensor in WHOLE.items():
        assert tensors[key].dtype == tensor.dtype and torch.equal(tensors[key], tensor), key
    with pytest.raises(KeyError):
        tensors["weights/c"]


def faults(listed: list, key: str):
    """Contents that do not fit, by what is wrong with them."""
    first, at = next((n, m) for n, part in enumerate(listed) for m, each in enumerate(part) if each["key"] == key)

    def changed(**fields):
        wrong = copy.deepcopy(listed)
        wrong[first][at].update(fields)
        return wrong

    yield "without a piece", [[each for each in part if each is not listed[first][at]] for part in listed]
    yield "twice", [part + [listed[first][at]] * (n == first) for n, part in enumerate(listed)]
    for fields in ({"start": -1}, {"stop": 1.5}, {"dtype": "object"}, {"dtype": ["float32"]}, {"shape": 3}, {"key": 5}):
        yield str(fields), changed(**fields)
    yield "another shape", changed(shape=[4, 4])
    yield "no list", {"a": 1}
    yield "too few", listed[:-1]
    yield "no description", [[None], *listed[1:]]


def test_contents_that_do_not_fit_are_refused(tmp_path):
    parts = [[Piece("weights/a", (3, 4), 0, torch.zeros(5))], [Piece("weights/a", (3, 4), 5, torch.zeros(7))]]
    written, listed = write(tmp_path, parts)
    index(tmp_path, written, listed)
    for what, wrong in faults(listed, "weights/a"):
        with pytest.raises(CheckpointError, match=r"manifest.json: damaged, "):
            index(tmp_path, written, wrong)
            pytest.fail(what)


def test_a_file_that_holds_something_else_is_told(tmp_path):
    written, listed = write(tmp_path, [[Piece.whole("weights/a", torch.zeros(3))]])
    tensors = Tensors(tmp_path, index(tmp_path, written, listed))
    files.write_tensors(tmp_path, written[0].name, {"weights/a": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match="weights/a is not what manifest.json says"):
        tensors["weights/a"]
    for content in (b"", b"12345678", b"\xff" * 100):
        (tmp_path / written[0].name).write_bytes(content)
        with pytest.raises(CheckpointError, match="rank-0000.safetensors: damaged, or no safetensors file"):
            tensors["weights/a"]
    (tmp_path / written[0].name).unlink()
    with pytest.raises(CheckpointError, match="rank-0000.safetensors: "):
        tensors["weights/a"]
