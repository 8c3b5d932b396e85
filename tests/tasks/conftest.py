"""A cache of each test's own, one thread, and a tokenizer."""

import pytest
import torch

from hpctrain.tasks.corpus import open_text


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What is prepared goes here, not into the cache of whoever runs the tests."""
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Models this small only lose by sharing their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> str:
    """A file of a byte-level BPE, trained on a part of the built-in text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    content = open_text(None)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([content.read(0, 60000).tobytes().decode(errors="replace")], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)
