"""Blocks of lines to tokens: parses documents, says what is wrong with a line, and assigns train or validation."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from data.tokenizer import Tokenizer

DEFAULT_SET = "text"  # the set of documents without meta.pile_set_name


class BadLine(ValueError):
    """A line that is no document. `reason` is a short word for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Tokenized:
    """Tokens of one block.

    Attributes:
        sets: by (split, set name): tokens [n], lengths [documents], text bytes [documents]; names in order of
            appearance.
        documents, empty: documents written, and dropped because their text is empty.
        skipped: bad lines by reason.
    """

    sets: dict[tuple[str, str], tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    documents: int = 0
    empty: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


def split_of(text: bytes, val_fraction: float) -> str:
    """`val` or `train`, from the text alone: copies of a document never lie on both sides."""
    if val_fraction <= 0:
        return "train"
    return "val" if int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) < val_fraction * 2**64 else "train"


def parse_line(line: bytes) -> tuple[str, str]:
    """Text and set name of a JSON line.

    Raises:
        BadLine: not UTF-8, not JSON, not an object, no `text`, or a field of the wrong type or named twice.
    """
    try:
        document = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as e:
        raise BadLine("encoding", f"invalid UTF-8 at byte {e.start + 1} of the line") from None
    except json.JSONDecodeError as e:
        raise BadLine("json", f"broken JSON at column {e.colno}: {e.msg}") from None
    except RecursionError:
        raise BadLine("json", "JSON nested too deeply") from None
    if not isinstance(document, dict):
        raise BadLine("object", f"a document must be a JSON object, this is {_kind(document)}")
    if "text" not in document:
        raise BadLine("text", "no field `text`")
    text, meta = document["text"], document.get("meta")
    if not isinstance(text, str):
        raise BadLine("text", f"`text` must be a string, this is {_kind(text)}")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    if name is None:
        return text, DEFAULT_SET
    if not isinstance(name, str) or not name:
        raise BadLine("set", f"`meta.pile_set_name` must be a non-empty string, this is {_kind(name)}")
    return text, name


def documents(data: bytes, line: int, is_text: bool) -> Iterator[tuple[int, str, str] | tuple[int, BadLine]]:
    """Yields (line number, text, set name) of each document of a block, or (line number, BadLine)."""
    if is_text:
        try:
            yield line, data.decode("utf-8"), DEFAULT_SET
        except UnicodeDecodeError as e:
            bad_line = line + data.count(b"\n", 0, e.start)
            yield bad_line, BadLine("encoding", f"invalid UTF-8 at byte {e.start + 1} of the text")
        return
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        raw = data[start:end]
        if raw and not raw.isspace():
            try:
                yield line, *parse_line(raw)
            except BadLine as e:
                yield line, e
        start, line = end + 1, line + 1


def bad_line(name: str, number: int, error: BadLine) -> ValueError:
    """What the user is told of a line that is no document."""
    return ValueError(f"input {name}: line {number}: {error}; correct it, or pass --skip_bad_lines to skip and count")


def tokenize(
    tokenizer: Tokenizer, data: bytes, line: int, is_text: bool, split: str | float, name: str, skip: bool
) -> Tokenized:
    """Tokens of a block's documents.

    Args:
        line: number of the block's first line.
        split: `train` or `val` for all documents, or the validation fraction.
        name: the input's name, for errors.
        skip: count bad lines instead of raising.
    Raises:
        ValueError: a bad line; names input and line.
    """
    out = Tokenized()
    parts: dict[tuple[str, str], list[tuple[np.ndarray, int]]] = {}
    for number, *document in documents(data, line, is_text):
        try:
            if isinstance(document[0], BadLine):
                raise document[0]
            text, set_name = document
            raw = _utf8(text)
        except BadLine as e:
            if not skip:
                raise bad_line(name, number, e) from None
            out.skipped[e.reason] = out.skipped.get(e.reason, 0) + 1
            continue
        if not text:
            out.empty += 1
            continue
        side = split if isinstance(split, str) else split_of(raw, split)
        parts.setdefault((side, set_name), []).append((tokenizer.encode_document(text), len(raw)))
        out.documents += 1
    for key, docs in parts.items():
        lengths = np.array([len(tokens) for tokens, _ in docs], dtype=np.int64)
        out.sets[key] = (
            np.concatenate([tokens for tokens, _ in docs]),
            lengths,
            np.array([n for _, n in docs], dtype=np.int64),
        )
    return out


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:  # JSON escapes can write half a surrogate pair
        raise BadLine("encoding", f"lone surrogate at character {e.start + 1} of the text") from None


def _object(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [k for k, _ in pairs]
        for key in ("text", "meta", "pile_set_name"):
            if keys.count(key) > 1:
                raise BadLine("duplicate", f"key `{key}` appears {keys.count(key)} times")
    return result


def _kind(value: object) -> str:
    return {"NoneType": "null", "list": "an array", "dict": "an object", "bool": "a boolean", "str": "a string"}.get(
        type(value).__name__, "a number"
    )
