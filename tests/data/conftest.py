"""Small tokenizers and corpora for the tests of `data`."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from data.tokenizer import Tokenizer, train_tokenizer

WORDS = "alpha beta gamma\tdelta\n    return x ;\n\n éclair 42 π {} () 日本 ".split(" ")


def make_text(seed: int, n_words: int) -> str:
    """Words of a small vocabulary with odd white space, the same for the same arguments."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(n_words))


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 330 ids."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    file.write_bytes(train_tokenizer((make_text(i, 50) for i in range(50)), 330))
    return file


@pytest.fixture(scope="session")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json with an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|pad|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((make_text(i, 50) for i in range(50)), trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@pytest.fixture(scope="session", params=["sentencepiece", "tokenizers"])
def tokenizer(request: pytest.FixtureRequest, model_file: Path, json_file: Path) -> Tokenizer:
    """Both kinds, one after the other."""
    return Tokenizer(model_file if request.param == "sentencepiece" else json_file)


@pytest.fixture(scope="session", name="make_text")
def make_text_fixture() -> Callable[[int, int], str]:
    return make_text


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes documents (texts, or (set, text) pairs) as JSON lines and returns the file."""

    def write(name: str, documents: list) -> Path:
        lines = []
        for document in documents:
            set_name, text = document if isinstance(document, tuple) else ("Wiki (en)", document)
            lines.append(json.dumps({"text": text, "meta": {"pile_set_name": set_name}}, ensure_ascii=False) + "\n")
        file = tmp_path / name
        file.write_text("".join(lines), encoding="utf-8")
        return file

    return write
