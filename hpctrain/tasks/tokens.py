"""Token ids in files, and text made into such files by a tokenizer.

A file of ids says nothing of its vocabulary, and a model with too few rows for an id fails deep inside a run, on a GPU
without a word of the cause. So a JSON file beside the ids names the size of the vocabulary, and every id is compared
with it before training. What a tokenizer makes of a text is kept in the cache as a file of the same form: encoding is
slow, and needs to be done once for all ranks and runs.

    tokens.npy or tokens.bin    uint16 or uint32 in one row; .bin is little-endian, without a header
    tokens.json                 {"vocab_size": 50257, "dtype": "uint16", "tokenizer": "tokenizer.json"}
"""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpctrain.tasks.storage import DataError, FileArray, cached, open_npy
from hpctrain.tasks.windows import Content, Scan, pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUFFIXES = (".npy", ".bin")
DTYPES = ("uint16", "uint32")
MAX_VOCAB_SIZE = 1 << 32
ENCODED_BYTES = 1 << 16  # at a time: a tokenizer takes some hundred times the memory of what it encodes
EXAMPLE = '{"vocab_size": 50257, "dtype": "uint16"}'


class Tokens(NamedTuple):
    """Token ids below `vocab_size`, and the path of the file of their tokenizer, where it is known."""

    ids: FileArray
    vocab_size: int
    tokenizer: str | None


def holds_tokens(path: str | None) -> bool:
    """Whether `path` is by its name a file of token ids."""
    return path is not None and path.endswith(SUFFIXES) and not os.path.isdir(path)


def open_tokens(path: str) -> Tokens:
    """The ids in a .npy or .bin file with a JSON file beside it; no id is read. DataError says what would fit."""
    if not os.path.exists(path):
        raise DataError(f"--data {path}: no such file or folder")
    if not os.path.isfile(path):
        raise DataError(f"--data {path}: neither a file nor a folder")
    beside = Path(path).with_suffix(".json")
    facts = _read_facts(path, beside)
    ids = _open_ids(path, beside, facts.get("dtype"))
    tokenizer = facts.get("tokenizer")
    if tokenizer is not None:
        if not isinstance(tokenizer, str) or not (beside.parent / tokenizer).is_file():
            raise DataError(f"--data {path}: {beside.name} names a tokenizer {json.dumps(tokenizer)}, which is no file")
        tokenizer = str(beside.parent / tokenizer)
    return Tokens(ids, facts["vocab_size"], tokenizer)


def check_ids(path: str, tokens: Tokens, found: Scan) -> None:
    """DataError where an id is not below the vocabulary size; `found` tells the largest id."""
    if found.largest >= tokens.vocab_size:
        raise DataError(
            f"--data {path}: id {found.largest} at position {found.place} is not below the vocabulary size"
            f" {tokens.vocab_size}; the JSON file beside it needs a vocab_size of {found.largest + 1} or more"
        )


def check_tokenizer(path: str) -> None:
    """DataError where there is no such file, or no package to read it. Neither is loaded."""
    if not os.path.isfile(path):
        raise DataError(f"{option(path)}: no such file; name a tokenizer.json")
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError(f"{option(path)}: needs the package tokenizers; pip install tokenizers")


def load_tokenizer(path: str, named: str) -> Tokenizer:
    """The tokenizer in a file of the `tokenizers` library. DataError, which begins with `named`, where it is none."""
    return _tokenizer_of(_read_tokenizer(path, named), named)


def tokenise(text: Content, sha256: str, path: str) -> Tokens:
    """The ids of `text`, bytes of the digest `sha256`, by the tokenizer in the file `path`.

    They are encoded where the cache lacks them, 64 KiB of text at a time. DataError names the tokenizer.
    """
    check_tokenizer(path)
    named = option(path)
    content = _read_tokenizer(path, named)
    key = f"tokens of {sha256} by {_tokenizer_sha256(content)}"
    facts = json.loads(cached(key, ".json", partial(_write_facts, content, named)).read_text())
    dtype = _little(facts["dtype"])
    ids = cached(key, ".bin", partial(_encode, text, sha256, content, named, dtype))
    return Tokens(FileArray(ids, dtype, name="HPCTRAIN_CACHE"), facts["vocab_size"], path)


def tokenised_sha256(sha256: str, path: str) -> str:
    """A digest of all that decides on the ids: the text, by its own digest, and the tokenizer."""
    return hashlib.sha256(f"{sha256} {_tokenizer_sha256(_read_tokenizer(path, option(path)))}".encode()).hexdigest()


def option(path: str) -> str:
    return f"--task-option tokenizer={path}"


def _tokenizer_sha256(content: bytes) -> str:
    return hashlib.sha256(content + version("tokenizers").encode()).hexdigest()


def _read_facts(path: str, beside: Path) -> dict[str, Any]:
    try:
        facts = json.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"--data {path}: no {beside.name} beside it; write one such as {EXAMPLE}") from None
    except OSError as error:
        raise DataError(f"--data {path}: cannot read {beside}: {error.strerror}") from None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise DataError(f"--data {path}: {beside.name} is no JSON such as {EXAMPLE}")
    size = facts.get("vocab_size")
    if type(size) is not int or not 0 < size <= MAX_VOCAB_SIZE:
        said = f"vocab_size {json.dumps(size)}" if "vocab_size" in facts else "no vocab_size"
        raise DataError(
            f"--data {path}: {beside.name} has {said}; it should be a positive whole number, as in {EXAMPLE}"
        )
    return facts


def _open_ids(path: str, beside: Path, named: Any) -> FileArray:
    if named not in (*DTYPES, None) or named is None and path.endswith(".bin"):
        said = f"dtype {json.dumps(named)}" if named is not None else "no dtype"
        raise DataError(f'--data {path}: {beside.name} has {said}; it should be "uint16" or "uint32"')
    if path.endswith(".bin"):
        size, item = os.path.getsize(path), np.dtype(named).itemsize
        if size % item:
            raise DataError(
                f"--data {path}: {size} bytes are no whole number of {named}; the file is cut off, or of another dtype"
            )
        return FileArray(path, _little(named))
    ids = open_npy(path)
    if ids.dtype.name not in DTYPES or len(ids.shape) != 1:
        raise DataError(
            f"--data {path}: holds {ids.dtype.name} in {len(ids.shape)} dimensions, not uint16 or uint32 in one;"
            " np.save(path, ids.ravel().astype(np.uint32)) converts"
        )
    if named not in (ids.dtype.name, None):
        raise DataError(f'--data {path}: holds {ids.dtype.name}, but {beside.name} says "{named}"; correct one of them')
    return ids


def _little(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")


def _read_tokenizer(path: str, named: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{named}: cannot read {path}: {error.strerror}") from None


def _tokenizer_of(content: bytes, named: str) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would take the cores of the other ranks
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(f"{named}: needs the package tokenizers; pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more precise
        raise DataError(f"{named}: no file of the tokenizers library ({_line(error)})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _write_facts(content: bytes, named: str, temporary: Path) -> None:
    """The JSON file beside the ids. Ids may have gaps, so the largest one counts and not their number."""
    size = max(_tokenizer_of(content, named).get_vocab(with_added_tokens=True).values(), default=0) + 1
    temporary.write_text(json.dumps({"vocab_size": size, "dtype": "uint16" if size <= 1 << 16 else "uint32"}))


def _encode(text: Content, sha256: str, content: bytes, named: str, dtype: np.dtype, temporary: Path) -> None:
    tokenizer, digest = _tokenizer_of(content, named), hashlib.sha256()
    with temporary.open("wb") as stream:
        for part in _parts(text, digest):
            try:
                (encoded,) = tokenizer.encode_batch_fast([part], add_special_tokens=False)  # `encode` keeps memory
            except Exception as error:
                raise DataError(f"{named}: cannot encode the text ({_line(error)})") from None
            stream.write(np.array(encoded.ids, dtype).tobytes())
    if digest.hexdigest() != sha256:
        raise DataError(f"{named}: the text changed while it was encoded; start again")


def _parts(text: Content, digest) -> Iterator[str]:
    """The text in parts of about 64 KiB that end with a line; a longer line is cut. `digest` takes in all bytes."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for piece in pieces(text, ENCODED_BYTES):
        digest.update(piece)
        rest += decoder.decode(piece.tobytes())
        end = rest.rfind("\n") + 1 or (len(rest) if len(rest) > ENCODED_BYTES else 0)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest := rest + decoder.decode(b"", final=True):
        yield rest


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
