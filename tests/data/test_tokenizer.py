"""Every text comes back, one id ends a document, and wrong files are named."""

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.tokenizer import MAX_PIECE, Tokenizer, _cut, load_tokenizer, train_tokenizer

ODD = [
    "def f(x):\n\treturn  x\r\n",
    "if (a<b) {\n    c++;\n}\n",
    "\u2581",
    "\x00\x07\x1b\x7f",
    "</s>",
    "<0x0A>",
    "\ufeff",
    " ",
]
TEXT = st.lists(st.one_of(st.text(), st.text(st.characters(max_codepoint=127)), st.sampled_from(ODD))).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
@example(text="</s><s><unk><|endoftext|><|pad|>")
@example(text="a\u2581\u2581 b \u2581")
@example(text="")
def test_decode_gives_every_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids


@pytest.mark.parametrize("unit", ["word ", "line\n", "x", "\n", "\u2581", "é\n  "], ids=ascii)
def test_long_documents_come_back_in_pieces(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (MAX_PIECE // len(unit) * 2 + 11)
    ids = tokenizer.encode_document(text)
    assert ids.dtype == np.uint16
    assert np.flatnonzero(ids == tokenizer.eod_id).tolist() == [len(ids) - 1]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == ids[:-1].tolist()


@settings(deadline=None)
@given(text=st.text("ab \n\t", max_size=200), limit=st.integers(5, 40), at_spaces=st.booleans())
def test_cut_loses_nothing_and_bounds_pieces(text: str, limit: int, at_spaces: bool) -> None:
    pieces = list(_cut(text, limit, at_spaces))
    assert (" " if at_spaces else "").join(pieces) == text
    if not at_spaces:
        assert all(0 < len(p) <= limit for p in pieces if text)


def test_model_with_dummy_prefix_stays_whole_over_pieces(tmp_path: Path, make_text) -> None:
    """A model that puts a space before each text, as many published ones do, must not put one into a long document."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([make_text(i, 20).replace("\n", " ") for i in range(99)]),
        model_prefix=str(tmp_path / "m"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = Tokenizer(tmp_path / "m.model")
    text = "alpha  beta gamma " * (MAX_PIECE // 9)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_gives_the_same_bytes_and_the_asked_size(model_file: Path, make_text) -> None:
    again = train_tokenizer((make_text(i, 50) for i in range(50)), 330)
    assert again == model_file.read_bytes()
    tokenizer = Tokenizer(model_file)
    assert (tokenizer.vocab_size, tokenizer.dtype, tokenizer.is_lossless) == (330, "uint16", True)


def test_dtype_follows_the_largest_id(json_file: Path, tmp_path: Path) -> None:
    raw = json.loads(json_file.read_text())
    for last, dtype in ((65535, "uint16"), (65536, "uint32")):
        raw["added_tokens"][1]["id"] = last
        raw["model"]["vocab"]["<|pad|>"] = last
        file = tmp_path / f"{last}.json"
        file.write_text(json.dumps(raw))
        tokenizer = Tokenizer(file)
        assert (tokenizer.vocab_size, tokenizer.dtype) == (last + 1, dtype)


def test_default_sentencepiece_is_found_lossy(tmp_path: Path, make_text) -> None:
    texts = iter([make_text(i, 20) for i in range(50)])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(tmp_path / "m"), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    assert not Tokenizer(tmp_path / "m.model").is_lossless


def test_directory_and_eod_token(json_file: Path, tmp_path: Path) -> None:
    assert load_tokenizer(json_file.parent).fingerprint == Tokenizer(json_file).fingerprint
    assert Tokenizer(json_file, "<|pad|>").eod_id == 1
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer.model nor tokenizer.json"):
        load_tokenizer(tmp_path)


def test_wrong_files_are_named(tmp_path: Path, json_file: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone.model: no such file"):
        Tokenizer(tmp_path / "gone.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"bad.model: not a SentencePiece model"):
        Tokenizer(tmp_path / "bad.model")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json: not a tokenizer.json"):
        Tokenizer(tmp_path / "bad.json")
    with pytest.raises(ValueError, match=r"no special token among <end>.*<\|endoftext\|>, <\|pad\|>"):
        Tokenizer(json_file, "<end>")


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="do not fit tokenizer"):
        tokenizer.decode([5, tokenizer.vocab_size])


@pytest.mark.parametrize("size", [100, 40000])
def test_impossible_vocabularies_are_refused(size: int, make_text) -> None:
    with pytest.raises(ValueError, match=f"train_tokenizer.*{size}"):
        train_tokenizer(iter([make_text(0, 100)]), size)
