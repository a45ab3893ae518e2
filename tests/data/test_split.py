"""Samples hold every token, padding is masked, positions restart, and files that fail are named."""

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import split as split_module
from data.shards import Manifest, ShardWriter
from data.split import IGNORE, ShardFiles, TokenSplit, positions_in_documents

EOD = 7


def write(root: Path, sets: dict[str, list[list[int]]], shard_tokens: int = 1 << 20, dtype: str = "uint16") -> Manifest:
    """A training split of documents, each ended by EOD."""
    written = []
    for name, documents in sorted(sets.items()):
        writer = ShardWriter(root, name, f"train/{name}", dtype, shard_tokens)
        lengths = np.array([len(d) + 1 for d in documents])
        writer.append(np.array([t for d in documents for t in [*d, EOD]], dtype=dtype), lengths, lengths)
        written.append(writer.finish())
    return Manifest(dtype, {"eod_id": EOD, "vocab_size": 100_000}, {"train": written})


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=3, max_size=30),
    seq_len=st.integers(1, 20),
    shard_tokens=st.integers(40, 200),
    packing=st.sampled_from(["chunk", "document"]),
)
@example(lengths=[1, 1, 1], seq_len=1, shard_tokens=40, packing="document")  # every token is a sample's first
def test_every_token_is_a_target_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, shard_tokens: int, packing: str
) -> None:
    """But for tokens that nothing comes before: a shard's first, with document packing a sample's first."""
    root = tmp_path_factory.mktemp("s")
    ids = iter(range(10, 60_000))
    documents = [[next(ids) for _ in range(n)] for n in lengths]
    manifest = write(root, {"a": documents}, shard_tokens)
    longest = max(shard.tokens for shard in manifest.shards())
    if longest < seq_len + 1:
        return
    split = TokenSplit(root, manifest, "train", seq_len, packing)
    batch = split.batch(np.zeros(split.sizes[0], dtype=int), np.arange(split.sizes[0]))
    tokens, targets = batch["tokens"], batch["targets"]
    real = targets != IGNORE
    counts = np.bincount(targets[real], minlength=60_000)
    assert counts[10:].max() <= 1
    shown = set(tokens.ravel().tolist())
    assert shown >= {t for d in documents for t in d}
    untargeted = {t for d in documents for t in d if counts[t] == 0}
    firsts = {d[0] for d in documents}
    assert untargeted <= firsts
    if packing == "chunk":
        assert len(untargeted) == len(manifest.shards())
    # a target is the token after its input
    follows = {a: b for d in documents for a, b in zip([*d], [*d[1:], EOD], strict=True)}
    pairs = zip(tokens[real].tolist(), targets[real].tolist(), strict=True)
    assert all(follows[a] == b for a, b in pairs if a != EOD)


def test_padding_is_eod_masked_and_at_position_zero(tmp_path: Path) -> None:
    manifest = write(tmp_path, {"a": [[10, 11, 12, 13]]})
    split = TokenSplit(tmp_path, manifest, "train", 3)
    batch = split.batch(np.array([0, 0, -1]), np.array([0, 1, 0]), with_position=True)
    assert batch["tokens"].tolist() == [[10, 11, 12], [13, EOD, EOD], [EOD] * 3]
    assert batch["targets"].tolist() == [[11, 12, 13], [EOD, IGNORE, IGNORE], [IGNORE] * 3]
    assert batch["position"].tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]


def test_ids_past_uint16_survive(tmp_path: Path) -> None:
    manifest = write(tmp_path, {"a": [[99_999, 152_063]]}, dtype="uint32")
    batch = TokenSplit(tmp_path, manifest, "train", 2).batch(np.array([0]), np.array([0]))
    assert batch["tokens"].tolist() == [[99_999, 152_063]]


@settings(deadline=None)
@given(tokens=st.lists(st.sampled_from([EOD, 8, 9]), max_size=40))
def test_positions_count_from_each_document(tokens: list[int]) -> None:
    expected, at = [], 0
    for token in tokens:
        expected.append(at)
        at = 0 if token == EOD else at + 1
    assert positions_in_documents(np.array(tokens), EOD).tolist() == expected


def test_many_shards_are_read_with_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "OPEN_FILES", 3)
    manifest = write(tmp_path, {"a": [[i, i + 1, i + 2] for i in range(10, 90, 4)]}, shard_tokens=4)
    split = TokenSplit(tmp_path, manifest, "train", 3)
    assert len(manifest.shards()) == 20
    for _ in range(2):
        batch = split.batch(np.zeros(20, dtype=int), np.arange(20))
        assert batch["tokens"][:, 0].tolist() == list(range(10, 90, 4))
        assert len(split.files._open) == 3
    again = pickle.loads(pickle.dumps(split))  # as a loading process gets it
    assert again.batch(np.array([0]), np.array([4]))["tokens"].tolist() == [[26, 27, 28]]


def test_vanished_file_is_named_after_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write(tmp_path, {"a": [[10, 11, 12]]})
    waits: list[float] = []
    monkeypatch.setattr(split_module.time, "sleep", waits.append)
    files = ShardFiles(tmp_path, "uint16")
    shard = manifest.shards()[0]
    bin_file = tmp_path / "train/a/shard-00000.bin"
    bin_file.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"train/a/shard-00000.bin: cannot be read \(No such file"):
        files.read(shard, 0, 2)
    assert waits == list(split_module.RETRY_SECONDS)


def test_file_that_comes_back_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write(tmp_path, {"a": [[10, 11, 12]]})
    bin_file, away = tmp_path / "train/a/shard-00000.bin", tmp_path / "away"
    shutil.move(bin_file, away)
    monkeypatch.setattr(split_module.time, "sleep", lambda _: away.exists() and shutil.move(away, bin_file))
    assert ShardFiles(tmp_path, "uint16").read(manifest.shards()[0], 1, 2).tolist() == [11, 12]


def test_file_truncated_while_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "RETRY_SECONDS", ())
    manifest = write(tmp_path, {"a": [list(range(10, 90))]})
    files = ShardFiles(tmp_path, "uint16")
    assert len(files.read(manifest.shards()[0], 0, 81)) == 81
    with open(tmp_path / "train/a/shard-00000.bin", "r+b") as f:
        f.truncate(100)
    with pytest.raises(ValueError, match=r"shard-00000.bin: truncated, it ends at byte 100"):
        files.read(manifest.shards()[0], 40, 20)


def test_missing_split_has_no_samples(tmp_path: Path) -> None:
    assert TokenSplit(tmp_path, write(tmp_path, {"a": [[1, 2]]}), "val", 2).sizes == []


def test_threads_read_at_once_with_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "OPEN_FILES", 2)  # each read of another shard closes a file
    manifest = write(tmp_path, {"a": [[i, i + 1, i + 2] for i in range(10, 250, 4)]}, shard_tokens=4)
    split = TokenSplit(tmp_path, manifest, "train", 3)

    def first_tokens(seed: int) -> bool:
        picks = np.random.default_rng(seed).integers(0, 60, 50)
        batch = split.batch(np.zeros(50, dtype=int), picks)
        return batch["tokens"][:, 0].tolist() == (10 + 4 * picks).tolist()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(first_tokens, range(40)))
