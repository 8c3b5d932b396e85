"""Text that a tokenizer makes into a token file, once."""

import builtins
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.tasks import tokens as tokens_module
from hpctrain.tasks.corpus import InMemory, open_text
from hpctrain.tasks.text import Text
from hpctrain.tasks.tokens import load_tokenizer, tokenise
from tests.harness.launch import ROOT
from tests.tasks.token_files import SMALL, refusal

tokenizers = pytest.importorskip("tokenizers")


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
