"""Token files: read as they are, or refused in one line that says what would work."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.tasks import windows as windows_module
from hpctrain.tasks.storage import stamp
from hpctrain.tasks.text import Text
from tests.tasks.token_files import CONVERT, EXAMPLE, SMALL, refusal, some_ids, token_file

tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_npy_and_bin_give_the_same_windows_and_digest(tmp_path, dtype):
    ids = some_ids(dtype=dtype)
    paths = [token_file(tmp_path / name, ids, vocab_size=50, dtype=dtype) for name in ("a.npy", "b.bin")]
    npy, binary = (Text(**SMALL, data=path) for path in paths)
    for task in (npy, binary):
        task.prepare()
    for split in ("train", "eval"):
        assert len(npy.dataset(split)) == len(binary.dataset(split)) > 10
        for one, other in zip(npy.dataset(split), binary.dataset(split)):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    inputs, targets = npy.dataset("eval")[2]
    assert inputs.dtype == torch.int64 and (inputs.tolist(), targets.tolist()) == (
        ids[8:12].tolist(),
        ids[9:13].tolist(),
    )
    assert npy.data_sha256() == binary.data_sha256() and npy.vocab_size == binary.vocab_size == 50


def test_big_endian_npy_is_read(tmp_path):
    path = token_file(tmp_path / "a.npy", some_ids().astype(">u2"), vocab_size=50)
    assert Text(**SMALL, data=path).dataset("eval")[0][0].tolist() == some_ids()[:4].tolist()


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_ids_are_below_the_vocabulary_size(tmp_path, suffix):
    ids = some_ids(vocab_size=49)
    ids[[400, 500]] = 49
    path = token_file(tmp_path / f"a.{suffix}", ids, vocab_size=50, dtype="uint16")
    task = Text(**SMALL, data=path)
    task.prepare()
    rows = [task.dataset("train")[row] for row in range(len(task.dataset("train")))]
    inputs, targets = (torch.stack(parts) for parts in zip(*rows))
    outputs = torch.nn.Sequential(*(factory() for factory in task.layers()))(inputs)
    assert outputs.shape == (*inputs.shape, 50) and task.loss(outputs, targets)[0].isfinite()
    token_file(tmp_path / f"a.{suffix}", ids, vocab_size=49, dtype="uint16")
    assert refusal(Text(**SMALL, data=path).prepare) == (
        f"--data {path}: id 49 at position 400 is not below the vocabulary size 49;"
        " the JSON file beside it needs a vocab_size of 50 or more"
    )


BESIDE = [
    ({}, f"no a.json beside it; write one such as {EXAMPLE}"),
    ({"dtype": "uint16"}, f"a.json has no vocab_size; it should be a positive whole number, as in {EXAMPLE}"),
    *(
        (
            {"vocab_size": size, "dtype": "uint16"},
            f"a.json has vocab_size {said}; it should be a positive whole number, as in {EXAMPLE}",
        )
        for size, said in [(0, "0"), (-3, "-3"), (50.0, "50.0"), ("50", '"50"'), (True, "true"), (None, "null")]
    ),
    ({"vocab_size": 50, "dtype": "int64"}, 'a.json has dtype "int64"; it should be "uint16" or "uint32"'),
    ({"vocab_size": 50, "dtype": ["uint16"]}, 'a.json has dtype ["uint16"]; it should be "uint16" or "uint32"'),
    (
        {"vocab_size": 50, "dtype": "uint16", "tokenizer": "none.json"},
        'a.json names a tokenizer "none.json", which is no file',
    ),
    ({"vocab_size": 50, "dtype": "uint16", "tokenizer": 3}, "a.json names a tokenizer 3, which is no file"),
]


@pytest.mark.parametrize("suffix", ["npy", "bin"])
@pytest.mark.parametrize(("facts", "line"), BESIDE)
def test_a_json_that_does_not_fit_is_refused(tmp_path, suffix, facts, line):
    path = token_file(tmp_path / f"a.{suffix}", some_ids(), **facts)
    assert refusal(Text, **SMALL, data=path) == f"--data {path}: {line}"


@pytest.mark.parametrize("content", ["", "{", "[1]", "3", '{"vocab_size": 50', "\udcff"])
def test_what_is_no_json_object_is_refused(tmp_path, content):
    path = token_file(tmp_path / "a.npy", some_ids())
    (tmp_path / "a.json").write_text(content, errors="surrogateescape")
    assert refusal(Text, **SMALL, data=path) == f"--data {path}: a.json is no JSON such as {EXAMPLE}"


def test_a_json_that_cannot_be_read_is_named(tmp_path):
    path = token_file(tmp_path / "a.npy", some_ids())
    (tmp_path / "a.json").mkdir()
    assert refusal(Text, **SMALL, data=path) == f"--data {path}: cannot read {tmp_path / 'a.json'}: Is a directory"


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (some_ids(dtype="int64"), "int64 in 1 dimensions"),
        (some_ids(dtype="float32"), "float32 in 1 dimensions"),
        (some_ids(dtype="uint8"), "uint8 in 1 dimensions"),
        (some_ids().reshape(70, 10), "uint16 in 2 dimensions"),
    ],
)
def test_an_array_of_another_kind_is_refused_and_the_cure_works(tmp_path, ids, said):
    path = token_file(tmp_path / "a.npy", ids, vocab_size=50)
    expected = f"--data {path}: holds {said}, not uint16 or uint32 in one; {CONVERT}"
    assert refusal(Text, **SMALL, data=path) == expected
    np.save(path, ids.ravel().astype(np.uint32))
    Text(**SMALL, data=path).prepare()


def test_a_dtype_that_contradicts_the_file_is_refused(tmp_path):
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=50, dtype="uint32")
    expected = f'--data {path}: holds uint16, but a.json says "uint32"; correct one of them'
    assert refusal(Text, **SMALL, data=path) == expected


def test_a_bin_file_needs_a_dtype_and_whole_ids(tmp_path):
    path = token_file(tmp_path / "a.bin", some_ids(), vocab_size=50)
    expected = f'--data {path}: a.json has no dtype; it should be "uint16" or "uint32"'
    assert refusal(Text, **SMALL, data=path) == expected
    token_file(tmp_path / "a.bin", some_ids(), vocab_size=50, dtype="uint32")
    os.truncate(path, 1399)
    assert refusal(Text, **SMALL, data=path) == (
        f"--data {path}: 1399 bytes are no whole number of uint32; the file is cut off, or of another dtype"
    )


def test_paths_that_are_no_file(tmp_path):
    path = str(tmp_path / "none.npy")
    assert refusal(Text, **SMALL, data=path) == f"--data {path}: no such file or folder"
    os.mkfifo(tmp_path / "pipe.bin")
    path = str(tmp_path / "pipe.bin")
    assert refusal(Text, **SMALL, data=path) == f"--data {path}: neither a file nor a folder"
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "folder.bin/a.txt").write_text("a" * 700)
    assert Text(**SMALL, data=str(tmp_path / "folder.bin")).vocab_size == 256


@pytest.mark.parametrize("size", [0, 69])
def test_too_few_tokens_are_refused_at_once(tmp_path, size):
    path = token_file(tmp_path / "a.npy", some_ids(size), vocab_size=50)
    assert refusal(Text, **SMALL, data=path) == (
        f"--data {path}: {size} tokens are too few; one window to train on and one to hold out take 70 tokens"
        " at --task-option context=4"
    )


def test_a_token_file_that_becomes_shorter_while_it_is_read_is_one_line(tmp_path):
    path = token_file(tmp_path / "a.bin", some_ids(), vocab_size=50, dtype="uint16")
    task = Text(**SMALL, data=path)
    os.truncate(path, 100)
    assert refusal(task.prepare) == f"--data {path}: {path} became shorter while it was read"


def test_ids_and_a_tokenizer_together_are_refused(tmp_path, tokenizer):
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=50)
    assert refusal(Text, **SMALL, data=path, tokenizer=tokenizer) == (
        f"--task-option tokenizer={tokenizer}: --data {path} holds token ids already; leave the option out"
    )


def slow_pair_nats(ids, context, vocab_size, paired) -> float:
    """The obvious loop, with nothing of the code under test."""
    block, counted = 16 * context + 1, {False: [], True: []}
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        part = part[: (len(part) - 1) // context * context + 1]
        counted[start // block % 10 == 0] += zip(part, part[1:])
    train, held_out = counted[False], counted[True]
    total = 0.0
    for a, b in held_out:
        single = (sum(t == b for _, t in train) + 1) / (len(train) + vocab_size)
        if paired:
            after = [t for s, t in train if s == a]
            single = (after.count(b) + 5 * single) / (len(after) + 5)
        total -= math.log(single)
    return total / len(held_out)


@pytest.mark.parametrize(("vocab_size", "paired"), [(50, True), (1024, True), (1025, False), (60000, False)])
def test_the_baseline_is_a_table_of_pairs_or_of_single_tokens(tmp_path, vocab_size, paired):
    ids = some_ids(800, 12)
    task = Text(**SMALL, data=token_file(tmp_path / "a.npy", ids, vocab_size=vocab_size))
    nats = slow_pair_nats(ids.tolist(), 4, vocab_size, paired)
    assert task.baseline() == {
        "loss": pytest.approx(nats, rel=1e-12),
        "bits_per_token": pytest.approx(nats / math.log(2), rel=1e-12),
    }


def test_metric_and_sample_of_tokens(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_bytes(Path(tokenizer).read_bytes())
    path = token_file(tmp_path / "a.npy", some_ids(vocab_size=300), vocab_size=310, tokenizer="tokenizer.json")
    task = Text(**SMALL, data=path)
    task.prepare()
    model = torch.nn.Sequential(*(factory() for factory in task.layers()))
    inputs, targets = (part.unsqueeze(0) for part in task.dataset("train")[0])
    outputs = model(inputs)
    total = -outputs.log_softmax(2).gather(2, targets.unsqueeze(2)).sum().item()
    metric = task.metric(outputs, targets)
    assert metric.keys() == task.baseline().keys() == {"loss", "bits_per_token"}
    assert metric["loss"] == (pytest.approx(total, rel=1e-5), 4)
    assert metric["bits_per_token"] == (pytest.approx(total / math.log(2), rel=1e-5), 4)

    def next_one(tokens):  # the id after the last one, never one of the ten that the tokenizer lacks
        scores = torch.full((1, tokens.shape[1], 310), -1e4)
        scores[0, torch.arange(tokens.shape[1]), (tokens[0] + 1) % 300] = 1e4
        return scores

    ids = some_ids(vocab_size=300)[:16].tolist()
    ids += [(ids[-1] + 1 + step) % 300 for step in range(200)]
    decoded = tokenizers.Tokenizer.from_file(tokenizer).decode(ids)
    shown = "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in decoded)
    assert task.sample(next_one) == shown
    assert Text(**SMALL, data=token_file(tmp_path / "b.npy", some_ids(), vocab_size=50)).sample(next_one) is None


def test_a_tokenizer_of_a_token_file_that_is_none_is_refused_before_training(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=50, tokenizer="other.json")
    line = refusal(Text(**SMALL, data=path).prepare)
    named = f"--data {path}: tokenizer {tmp_path / 'other.json'}: no file of the tokenizers library ("
    assert line.startswith(named)


def test_the_stamp_is_that_of_the_data(tmp_path):
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=50)
    task = Text(**SMALL, data=path)
    before = task.data_stamp()
    task.prepare()
    assert task.data_stamp() == before and stamp(before.path) == before
    np.save(path, some_ids(900))
    assert task.data_stamp() != before and Text(**SMALL).data_stamp() is None


def test_a_long_scan_of_ids_is_kept_with_the_place_of_the_largest(tmp_path, monkeypatch):
    monkeypatch.setattr(windows_module, "KEPT_FROM", 100)
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=49)
    lines = {refusal(Text(**SMALL, data=path).prepare)}
    monkeypatch.setattr(windows_module, "_scan", lambda content: pytest.fail("scanned again"))
    lines.add(refusal(Text(**SMALL, data=path).prepare))
    assert len(lines) == 1 and f"id 49 at position {some_ids().tolist().index(49)} " in lines.pop()


def test_ids_written_during_the_run_that_no_model_knows_are_one_line(tmp_path):
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=50)
    task = Text(**SMALL, data=path)
    task.prepare()
    rows = task.dataset("train")
    rows[0]
    np.save(path, np.full(700, 60, np.uint16))
    expected = "--data: id 60 is not below vocab_size 50; somebody changed the file meanwhile"
    assert refusal(rows.__getitem__, 1) == expected
