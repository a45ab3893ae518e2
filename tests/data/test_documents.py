"""Lines become documents, and a line that is none is named or counted."""

import json

import numpy as np
import pytest

from data.documents import DEFAULT_SET, split_of, tokenize
from data.tokenizer import Tokenizer

BAD = {
    b'{"text": "a"': ("json", "broken JSON at column 13"),
    b"not json": ("json", "broken JSON at column 1"),
    b"[1, 2]": ("object", "must be a JSON object, this is an array"),
    b'"text"': ("object", "this is a string"),
    b"{}": ("text", "no field `text`"),
    b'{"text": null}': ("text", "`text` must be a string, this is null"),
    b'{"text": 3}': ("text", "`text` must be a string, this is a number"),
    b'{"text": ["a"]}': ("text", "this is an array"),
    b'{"text": "a", "text": "b"}': ("duplicate", "key `text` appears 2 times"),
    b'{"text": "a", "meta": {"pile_set_name": "x", "pile_set_name": "y"}}': ("duplicate", "`pile_set_name` appears 2"),
    b'{"text": "a", "meta": {"pile_set_name": 4}}': ("set", "`meta.pile_set_name` must be a non-empty string"),
    b'{"text": "a\xff"}': ("encoding", "invalid UTF-8 at byte 12 of the line"),
    rb'{"text": "a\ud800"}': ("encoding", "lone surrogate at character 2 of the text"),
    b"[" * 100_000: ("json", "nested too deeply"),
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: ascii(line[:40]))
def test_bad_lines_are_named_or_counted(tokenizer: Tokenizer, line: bytes) -> None:
    reason, message = BAD[line]
    data = b'{"text": "good"}\n\n' + line + b'\n{"text": "also good"}\n'
    with pytest.raises(ValueError, match=f"input f.jsonl: line 43: .*{message}.*--skip_bad_lines"):
        tokenize(tokenizer, data, 41, False, "train", "f.jsonl", skip=False)
    out = tokenize(tokenizer, data, 41, False, "train", "f.jsonl", skip=True)
    assert out.skipped == {reason: 1}
    assert out.documents == 2


def test_documents_end_with_one_eod_and_keep_their_text(tokenizer: Tokenizer) -> None:
    texts = ["one\r\ntwo\ttab  spaces", "</s><|endoftext|>", "  ", "", "\u2028 \x00"]
    lines = [json.dumps({"text": t, "meta": {"pile_set_name": "A" if i % 2 else "B"}}) for i, t in enumerate(texts)]
    data = "\r\n".join([*lines, "", "   "]).encode()
    out = tokenize(tokenizer, data, 1, False, "train", "f", skip=False)
    assert (out.documents, out.empty) == (4, 1)
    assert list(out.sets) == [("train", "B"), ("train", "A")]
    back = []
    for tokens, lengths, text_bytes in out.sets.values():
        docs = np.split(tokens, np.cumsum(lengths)[:-1])
        assert all((d == tokenizer.eod_id).nonzero()[0].tolist() == [len(d) - 1] for d in docs)
        decoded = [tokenizer.decode(d) for d in docs]
        assert text_bytes.tolist() == [len(d.encode()) for d in decoded]
        back += decoded
    assert sorted(back) == sorted(t for t in texts if t)


@pytest.mark.parametrize("meta", ["", ', "meta": null', ', "meta": {}', ', "meta": "x"', ', "meta": {"other": 1}'])
def test_documents_without_a_set_get_the_default_one(tokenizer: Tokenizer, meta: str) -> None:
    out = tokenize(tokenizer, f'{{"text": "a"{meta}}}'.encode(), 1, False, "train", "f", skip=False)
    assert list(out.sets) == [("train", DEFAULT_SET)]


def test_text_files_are_one_document(tokenizer: Tokenizer) -> None:
    out = tokenize(tokenizer, b"{not json}\r\nsecond line\n", 1, True, "val", "f.txt", skip=False)
    ((tokens, _, _),) = out.sets.values()
    assert list(out.sets) == [("val", DEFAULT_SET)]
    assert tokenizer.decode(tokens) == "{not json}\r\nsecond line\n"
    with pytest.raises(ValueError, match=r"f.txt: line 12: invalid UTF-8 at byte 5"):
        tokenize(tokenizer, b"ok\nx\xff", 11, True, "val", "f.txt", skip=False)


def test_split_is_by_text_and_by_share() -> None:
    sides = [split_of(f"document {i}".encode(), 0.1) for i in range(20_000)]
    assert abs(sides.count("val") / len(sides) - 0.1) < 0.01
    assert split_of(b"document 5", 0.1) == sides[5]
    assert {split_of(f"{i}".encode(), 0.0) for i in range(100)} == {"train"}
