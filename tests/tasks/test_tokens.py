"""Token files that are read or refused, and text that a tokenizer makes into such a file once."""

import builtins
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.tasks import tokens as tokens_module
from hpctrain.tasks import windows as windows_module
from hpctrain.tasks.corpus import InMemory, open_text
from hpctrain.tasks.storage import DataError, changed_since
from hpctrain.tasks.text import Text
from hpctrain.tasks.tokens import load_tokenizer, tokenise
from tests.harness.launch import ROOT

tokenizers = pytest.importorskip("tokenizers")

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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
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


@pytest.mark.parametrize("where", ["file", "folder", "built-in"])
def test_text_is_encoded_once_and_read_by_all(tmp_path, tokenizer, cache, monkeypatch, where):
    text = open_text(None).read(0, 50000).tobytes().decode(errors="replace") + "Grüße, 世界 \N{GRINNING FACE}"
    data = None
    if where != "built-in":
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / "a.txt").write_bytes(text.encode()[:20001])
        (folder / "b.txt").write_bytes(text.encode()[20001:])
        (tmp_path / "whole.txt").write_bytes(text.encode())
        data = str(folder if where == "folder" else tmp_path / "whole.txt")
    written, encode = [], tokens_module._encode
    monkeypatch.setattr(tokens_module, "_encode", lambda *rest: written.append(rest[-1]) or encode(*rest))
    first, second = (Text(**SMALL, data=data, tokenizer=tokenizer) for _ in range(2))
    first.prepare()
    assert len(written) == 1
    monkeypatch.setattr(tokens_module, "_tokenizer_of", lambda *_: pytest.fail("the tokenizer was loaded again"))
    assert second.vocab_size == 300 and len(second.dataset("train")) == len(first.dataset("train"))
    assert second.baseline() == first.baseline() and second.data_sha256() == first.data_sha256()
    assert len(written) == 1 and sorted(path.suffix for path in cache.iterdir()) == [".bin", ".json"]
    if data:
        content = second.dataset("train").content
        assert content.dtype == np.uint16
        assert tokenizers.Tokenizer.from_file(tokenizer).decode(content.read(0, len(content)).tolist()) == text


def test_another_text_or_tokenizer_is_encoded_anew(tmp_path, tokenizer, cache):
    path, other = tmp_path / "a.txt", tmp_path / "other.json"
    digests = set()
    for text, content in [("ab " * 300, ""), ("ba " * 300, ""), ("ab " * 300, "\n")]:
        path.write_text(text)
        other.write_text(Path(tokenizer).read_text() + content)
        task = Text(**SMALL, data=str(path), tokenizer=str(other))
        task.prepare()
        digests.add(task.data_sha256())
    assert len(digests) == 3 and len(list(cache.glob("*.bin"))) == 3


def test_parts_are_cut_at_line_ends_and_lose_nothing(tokenizer, monkeypatch):
    text = "".join(f"{'é' * (number % 40)} line {number}\n" for number in range(3000)) + "x" * 9000 + "\nend €"
    raw, parts, digest = InMemory(np.frombuffer(text.encode() + b"\xff\xe2", np.uint8)), [], []
    monkeypatch.setattr(tokens_module, "ENCODED_BYTES", 1000)

    class Digest:
        def update(self, piece):
            digest.append(piece.tobytes())

    parts = list(tokens_module._parts(raw, Digest()))
    assert "".join(parts) == text + "\ufffd\ufffd" and b"".join(digest) == text.encode() + b"\xff\xe2"
    cut = [part for part in parts if not part.endswith("\n")]
    assert all("x" in part or part is parts[-1] for part in cut), "a line was cut that is shorter than a piece"
    assert len(parts) > 60 and max(map(len, parts)) <= 2000


def test_a_vocabulary_of_more_than_65536_takes_uint32(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    for size, dtype in ((65536, np.uint16), (65537, np.uint32)):
        made = Tokenizer(models.WordLevel({"a": 0, "b": size - 1}, unk_token="a"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.enable_truncation(5)
        made.enable_padding()
        made.save(str(tmp_path / "t.json"))
        (tmp_path / "a.txt").write_text("a b " * 50)
        task = Text(**SMALL, data=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "t.json"))
        task.prepare()
        content = task.dataset("train").content
        assert task.vocab_size == size and content.dtype == dtype
        assert content.read(0, len(content)).tolist() == [0, size - 1] * 50, "cut off or filled up"


def test_tokenizer_files_that_do_not_fit_are_named(tmp_path, tokenizer, monkeypatch, cache):
    (tmp_path / "a.txt").write_text("some text " * 100)
    data, other = str(tmp_path / "a.txt"), str(tmp_path / "other.json")
    named = f"--task-option tokenizer={other}: "
    assert refusal(Text, **SMALL, data=data, tokenizer=other) == f"{named}no such file; name a tokenizer.json"
    for content in (b"", b"{}", b"\xff", b'{"model": {"type": "None"}}'):
        (tmp_path / "other.json").write_bytes(content)
        line = refusal(Text(**SMALL, data=data, tokenizer=other).prepare)
        assert line.startswith(f"{named}no file of the tokenizers library (")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    made.save(other)
    line = refusal(Text(**SMALL, data=data, tokenizer=other).prepare)
    assert line.startswith(f"{named}cannot encode the text (")
    assert list(cache.glob("*.bin")) == list(cache.glob(".*")) == []
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: (_ for _ in ()).throw(PermissionError(13, "Denied")))
    assert refusal(Text(**SMALL, data=data, tokenizer=other).prepare) == f"{named}cannot read {other}: Denied"


def test_without_the_package_the_cure_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    expected = f"--task-option tokenizer={tokenizer}: needs the package tokenizers; pip install tokenizers"
    assert refusal(Text, **SMALL, tokenizer=tokenizer) == expected
    assert refusal(load_tokenizer, tokenizer, "--data x").endswith("pip install tokenizers")


def test_a_text_with_too_few_tokens_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("return " * 10)
    task = Text(**SMALL, data=str(tmp_path / "a.txt"), tokenizer=tokenizer)
    for call in (task.prepare, lambda: task.dataset("train")):
        line = refusal(call)
        assert line.endswith("one window to train on and one to hold out take 70 tokens at --task-option context=4")


def test_a_text_that_changes_while_it_is_encoded_is_refused(tokenizer, cache):
    text = InMemory(np.frombuffer(b"one text\n" * 100, np.uint8))
    line = refusal(tokenise, text, "0" * 64, tokenizer)
    assert line == f"--task-option tokenizer={tokenizer}: the text changed while it was encoded; start again"
    assert list(cache.glob("*.bin")) == []


def test_a_cache_that_cannot_be_used_is_named(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "file"))
    line = refusal(Text(**SMALL, tokenizer=tokenizer).prepare)
    assert line.startswith(f"HPCTRAIN_CACHE: cannot keep a file in {tmp_path}/file: File exists")


def test_processes_that_prepare_at_once_end_with_one_whole_file(tokenizer, cache):
    program = (
        "import sys; from hpctrain.tasks.text import Text; task = Text(tokenizer=sys.argv[1], context=16); "
        "print('ready', flush=True); sys.stdin.readline(); task.prepare(); print(task.baseline(), task.data_sha256())"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, tokenizer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0] and printed[0] == printed[1]
    assert sorted(path.suffix for path in cache.iterdir()) == [".bin", ".json"]
    task = Text(tokenizer=tokenizer, context=16)
    content = task.dataset("train").content
    text = open_text(None)
    ids = content.read(0, len(content)).tolist()
    assert tokenizers.Tokenizer.from_file(tokenizer).decode(ids).encode() == text.read(0, len(text)).tobytes()


def test_tokenizers_is_loaded_by_prepare_alone(tokenizer, monkeypatch):
    asked, real = [], builtins.__import__

    def note(name, *rest):
        asked.append(name)
        return real(name, *rest)

    task = Text(**SMALL, tokenizer=tokenizer)
    monkeypatch.setattr(builtins, "__import__", note)
    Text(**SMALL, tokenizer=tokenizer)
    assert "tokenizers" not in asked
    task.prepare()
    assert "tokenizers" in asked


def test_the_stamp_is_that_of_the_data(tmp_path):
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=50)
    task = Text(**SMALL, data=path)
    before = task.data_stamp()
    task.prepare()
    assert task.data_stamp() == before and changed_since(before) is None
    np.save(path, some_ids(900))
    assert task.data_stamp() != before and Text(**SMALL).data_stamp() is None


def test_a_long_scan_of_ids_is_kept_with_the_place_of_the_largest(tmp_path, monkeypatch):
    monkeypatch.setattr(windows_module, "KEPT_FROM", 100)
    path = token_file(tmp_path / "a.npy", some_ids(), vocab_size=49)
    lines = {refusal(Text(**SMALL, data=path).prepare)}
    monkeypatch.setattr(windows_module, "_scan", lambda content: pytest.fail("scanned again"))
    lines.add(refusal(Text(**SMALL, data=path).prepare))
    assert len(lines) == 1 and f"id 49 at position {some_ids().tolist().index(49)} " in lines.pop()
