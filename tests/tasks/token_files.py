"""Token files of a test's own, and the lines with which they are refused."""

import json

import numpy as np
import pytest

from hpctrain.tasks.storage import DataError

SMALL = {"num_layers": 1, "width": 8, "num_heads": 2, "context": 4}
EXAMPLE = '{"vocab_size": 50257, "dtype": "uint16"}'
CONVERT = "np.save(path, ids.ravel().astype(np.uint32)) converts"


def some_ids(size=700, vocab_size=50, dtype="uint16", seed=3) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, vocab_size, size).astype(dtype)


def token_file(path, ids, **facts) -> str:
    """`ids` as the file `path` with a JSON of `facts` beside it, none where there are no facts."""
    if path.suffix == ".npy":
        np.save(path, ids)
    else:
        path.write_bytes(ids.astype(ids.dtype.newbyteorder("<")).tobytes())
    if facts:
        path.with_suffix(".json").write_text(json.dumps(facts))
    return str(path)


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
