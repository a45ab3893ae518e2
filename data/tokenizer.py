"""SentencePiece `.model` and Hugging Face `tokenizer.json` behind one class, and training of a lossless model."""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character, so the character itself needs another way in
MAX_PIECE = 1 << 16  # characters encoded at once: bounds memory on a 100 MB document
CUT_WINDOW = 1 << 12  # characters searched backwards for a good place to cut
TRAIN_SENTENCE = 4000  # characters of a training sentence; SentencePiece skips what is longer than its limit
EOD_CANDIDATES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
PROBE = "def f(x):\n\treturn  x\r\n\n\u00e9e\u0301 \u2581 \u00a0\x00 </s> \U0001d518 "


class Tokenizer:
    """Text to ids and back, with exactly one end-of-document id that no text can produce.

    Attributes:
        path: the tokenizer's file.
        kind: `sentencepiece` or `tokenizers`.
        fingerprint: SHA-256 of the file, hexadecimal.
        vocab_size: number of ids, the largest id plus one.
        eod_id: the end-of-document id; `eod_token` its name where one was asked for.
        dtype: `uint16`, or `uint32` where an id may exceed 65,535.
    """

    def __init__(self, path: str | os.PathLike, eod_token: str | None = None) -> None:
        self.path = Path(path)
        self.eod_token = eod_token
        if not self.path.is_file():
            raise FileNotFoundError(
                f"tokenizer {self.path}: no such file; give a SentencePiece .model or a tokenizer.json"
            )
        blob = self.path.read_bytes()
        self.fingerprint = hashlib.sha256(blob).hexdigest()
        if self.path.suffix == ".json":
            self.kind = "tokenizers"
            self._load_json(blob, eod_token)
        else:
            self.kind = "sentencepiece"
            self._load_model(blob, eod_token)
        self.dtype = "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def _load_model(self, blob: bytes, eod_token: str | None) -> None:
        import sentencepiece

        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=blob)
        except RuntimeError as e:
            raise ValueError(f"tokenizer {self.path}: not a SentencePiece model ({_first_line(e)})") from e
        self.vocab_size = self._sp.vocab_size()
        self.eod_id = self._sp.eos_id() if eod_token is None else self._sp.piece_to_id(eod_token)
        if self.eod_id < 0 or not self._sp.is_control(self.eod_id):
            raise ValueError(
                f"tokenizer {self.path}: no control symbol {eod_token or 'eos'} to end documents with; "
                "name one with --eod_token"
            )
        mark = [self._sp.piece_to_id(f"<0x{b:02X}>") for b in SPACE_MARK.encode()]
        self._mark = mark if all(self._sp.is_byte(i) for i in mark) else None
        # A model with a dummy prefix puts a space before each text it is given: later pieces must give theirs up.
        first = self._sp.encode("a", out_type=str)
        self._prefixes = bool(first) and first[0].startswith(SPACE_MARK)

    def _load_json(self, blob: bytes, eod_token: str | None) -> None:
        import tokenizers

        try:
            self._hf = tokenizers.Tokenizer.from_str(blob.decode())
        except Exception as e:  # the library raises bare Exception
            raise ValueError(f"tokenizer {self.path}: not a tokenizer.json ({_first_line(e)})") from e
        self._hf.no_truncation()
        self._hf.no_padding()
        # Without this the *text* "<|endoftext|>" would become the end-of-document id.
        self._hf.encode_special_tokens = True
        special = {a["content"]: a["id"] for a in json.loads(blob).get("added_tokens", []) if a.get("special")}
        names = EOD_CANDIDATES if eod_token is None else (eod_token,)
        found = [special[n] for n in names if n in special]
        if not found:
            raise ValueError(
                f"tokenizer {self.path}: no special token among {', '.join(names)} to end documents with; "
                f"name one of {', '.join(sorted(special)[:8]) or 'none'} with --eod_token"
            )
        self.eod_id = found[0]
        self.vocab_size = max(self._hf.get_vocab(with_added_tokens=True).values()) + 1
        self._prefixes = False

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document id; beyond 65,536 characters in pieces cut at line ends."""
        if len(text) <= MAX_PIECE:
            return self._encode_piece(text)
        ids: list[int] = []
        for piece in _cut(text, MAX_PIECE, self._prefixes):
            ids.extend(self._encode_piece(piece))
        return ids

    def encode_document(self, text: str) -> np.ndarray:
        """Ids of `text` and the end-of-document id, [n_tokens] in the tokenizer's dtype."""
        pieces = [text] if len(text) <= MAX_PIECE else _cut(text, MAX_PIECE, self._prefixes)
        arrays = [
            np.array(self._encode_piece(p), dtype=self.dtype) for p in pieces
        ]  # a list of ids takes 16 times as much
        return np.concatenate([*arrays, np.array([self.eod_id], dtype=self.dtype)])

    def _encode_piece(self, text: str) -> list[int]:
        if self.kind == "tokenizers":
            return self._hf.encode(text, add_special_tokens=False).ids
        if SPACE_MARK not in text or self._mark is None:
            return self._sp.encode(text)
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE_MARK)):
            ids.extend(self._mark if i else ())
            ids.extend(self._sp.encode(part))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; end-of-document ids give nothing. Ids outside the vocabulary are a ValueError."""
        kept = [int(i) for i in ids if i != self.eod_id]
        if kept and not 0 <= min(kept) <= max(kept) < self.vocab_size:
            raise ValueError(
                f"ids between {min(kept)} and {max(kept)} do not fit tokenizer {self.path} with {self.vocab_size} ids"
            )
        if self.kind == "tokenizers":
            return self._hf.decode(kept, skip_special_tokens=False)
        return self._sp.decode(kept)

    @property
    def is_lossless(self) -> bool:
        """Whether a text of tabs, newlines, double spaces, marks and control characters comes back unchanged."""
        return self.decode(self.encode(PROBE)) == PROBE


def load_tokenizer(path: str | os.PathLike, eod_token: str | None = None) -> Tokenizer:
    """Loads a tokenizer file, or the one inside a prepared directory (or a directory that holds a tokenizer.json)."""
    path = Path(path)
    if not path.is_dir():
        return Tokenizer(path, eod_token)
    for name in ("tokenizer.model", "tokenizer.json"):
        if (path / name).is_file():
            if eod_token is None and (path / "manifest.json").is_file():
                eod_token = json.loads((path / "manifest.json").read_text())["tokenizer"].get("eod_token")
            return Tokenizer(path / name, eod_token)
    raise FileNotFoundError(f"tokenizer: {path} holds neither tokenizer.model nor tokenizer.json")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a lossless byte-fallback BPE model and returns the bytes of its `.model` file.

    Identity normalisation, no dummy prefix, no whitespace removal: every string comes back unchanged. Same texts, same
    bytes.

    Args:
        texts: documents; what is trained on is all of them, so the caller bounds their size.
        vocab_size: number of ids, among them 256 bytes, `<unk>` and `</s>`.
    Raises:
        ValueError: the vocabulary is too small or too large for the texts.
    """
    import sentencepiece

    if vocab_size < 300:
        raise ValueError(f"train_tokenizer must be at least 300 (256 bytes, 2 symbols and some text), got {vocab_size}")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9999,
            max_sentencepiece_length=32,
            max_sentence_length=16 * TRAIN_SENTENCE,  # in bytes
            num_threads=16,  # a constant: it is written into the model, and the bytes must not depend on the machine
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, StopIteration) as e:
        raise ValueError(
            f"train_tokenizer={vocab_size}: the text does not carry such a vocabulary; "
            f"choose another size ({_first_line(e)})"
        ) from e
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from _cut(text.replace(SPACE_MARK, " ").replace("\x00", " "), TRAIN_SENTENCE, False)


def _cut(text: str, limit: int, at_spaces: bool) -> Iterator[str]:
    """Cuts text into pieces of at most `limit` characters, after a line end or before a space where one is near.

    With `at_spaces` (models that add a space before each text) a piece ends only before a space, and the next one goes
    without it.
    """
    start = 0
    while len(text) - start > limit:
        low, high = max(start, start + limit - CUT_WINDOW), start + limit
        cut = -1 if at_spaces else _last_line_end(text, low, high)
        if cut < 0:
            cut = text.rfind(" ", low + 1, high)
        if cut < 0 and at_spaces:
            cut = text.find(" ", high)
            if cut < 0:
                break
        elif cut < 0:
            cut = high
        yield text[start:cut]
        start = cut + at_spaces
    yield text[start:]


def _last_line_end(text: str, low: int, high: int) -> int:
    """Position after the last newline in (low, high) that a non-space follows, where pre-tokenizers cut too; or -1."""
    at = text.rfind("\n", low, high - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", low, at)
    return at + 1 if at >= 0 else -1


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
