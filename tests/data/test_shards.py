"""Shards hold the documents they were given, and say what is wrong with them."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shards import (
    IDX_DTYPE,
    Manifest,
    Shard,
    ShardWriter,
    check_content,
    check_hash,
    check_size,
    load_manifest,
    safe_name,
)

EOD = 7


def documents_of(root: Path, shards: list[Shard]) -> list[list[int]]:
    out = []
    for shard in shards:
        tokens = np.fromfile(root / (shard.path + ".bin"), dtype="<u2")
        starts = np.fromfile(root / (shard.path + ".idx"), dtype=IDX_DTYPE).astype(int)
        assert len(starts) == shard.documents + 1
        assert starts[-1] == shard.tokens == len(tokens)
        out += [tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
    return out


def append(writer: ShardWriter, documents: list[list[int]]) -> None:
    lengths = np.array([len(d) for d in documents], dtype=np.int64)
    tokens = np.array([t for d in documents for t in d], dtype=np.uint16)
    writer.append(tokens, lengths, lengths * 2)


def writer_in(root: Path, shard_tokens: int = 100) -> ShardWriter:
    return ShardWriter(root, "Wiki", "train/wiki", "uint16", shard_tokens)


DOCUMENTS = st.lists(st.lists(st.integers(10, 65535), max_size=30).map(lambda d: [*d, EOD]), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, batch=st.integers(1, 9), shard_tokens=st.integers(1, 80))
def test_documents_come_back_whole_whatever_the_batches(
    tmp_path_factory: pytest.TempPathFactory, documents: list, batch: int, shard_tokens: int
) -> None:
    roots = [tmp_path_factory.mktemp("w") for _ in range(2)]
    sets = []
    for root, step in zip(roots, (batch, len(documents)), strict=True):
        writer = writer_in(root, shard_tokens)
        for at in range(0, len(documents), step):
            append(writer, documents[at : at + step])
        sets.append(writer.finish())
    assert sets[0] == sets[1]
    assert documents_of(roots[0], sets[0].shards) == documents
    assert all(s.tokens <= shard_tokens or s.documents == 1 for s in sets[0].shards)
    assert sets[0].bytes == 2 * sets[0].tokens
    for shard in sets[0].shards:
        check_hash(roots[0], shard, 2)


@settings(max_examples=40, deadline=None)
@given(documents=DOCUMENTS, data=st.data(), shard_tokens=st.integers(10, 80))
def test_writer_restored_after_more_was_written_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, documents: list, data: st.DataObject, shard_tokens: int
) -> None:
    saved, lost = sorted(data.draw(st.tuples(*[st.integers(0, len(documents))] * 2)))
    root, straight_root = tmp_path_factory.mktemp("w"), tmp_path_factory.mktemp("w")
    writer = writer_in(root, shard_tokens)
    append(writer, documents[:saved])
    writer.sync()
    state = writer.state()
    append(writer, documents[saved:lost])  # reaches the disk, and is not in the state
    writer.abandon()
    again = writer_in(root, shard_tokens)
    again.restore(state)
    append(again, documents[saved:])
    straight = writer_in(straight_root, shard_tokens)
    append(straight, documents)
    assert again.finish() == straight.finish()
    assert documents_of(root, again.set.shards) == documents


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Shard, Manifest]:
    writer = writer_in(tmp_path)
    append(writer, [[11, 12, EOD], [13, EOD], [14, 15, 16, EOD]])
    shard = writer.finish().shards[0]
    return tmp_path, shard, Manifest("uint16", {"vocab_size": 100, "eod_id": EOD}, {"train": [writer.set]})


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_truncation_is_found_and_named(written: tuple, suffix: str) -> None:
    root, shard, _ = written
    file = root / (shard.path + suffix)
    size = file.stat().st_size
    for length in range(size - 1, -1, -1):
        os.truncate(file, length)
        with pytest.raises(
            ValueError, match=rf"{suffix}: (truncated|empty), it ends at byte {length} instead of {size}"
        ):
            check_size(root, shard, 2)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"{suffix}: missing"):
        check_size(root, shard, 2)


def test_truncation_at_every_hundredth_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    writer = writer_in(tmp_path, 10_000)
    append(writer, [[*range(10, 1000), EOD]] * 5)
    shard = writer.finish().shards[0]
    file = tmp_path / (shard.path + ".bin")
    size = file.stat().st_size
    for length in range(size - size % 100, -1, -100):
        os.truncate(file, length)
        with pytest.raises(ValueError, match=f"it ends at byte {length} instead of {size}"):
            check_size(tmp_path, shard, 2)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_changed_byte_is_found(written: tuple, suffix: str) -> None:
    root, shard, manifest = written
    file = root / (shard.path + suffix)
    good = file.read_bytes()
    check_content(root, shard, manifest)
    for i in range(len(good)):
        file.write_bytes(good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :])
        with pytest.raises(ValueError, match=f"{suffix}: damaged"):
            check_hash(root, shard, 2)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[11, EOD, 12, EOD]], "do not match the document starts"),
        ([[11, 12]], "do not match"),
        ([[100, EOD]], "id 100"),
    ],
    ids=["two-eods", "no-eod", "foreign-id"],
)
def test_content_that_breaks_the_format_is_found(tmp_path: Path, documents: list, message: str) -> None:
    writer = writer_in(tmp_path)
    append(writer, documents)
    shard = writer.finish().shards[0]
    with pytest.raises(ValueError, match=message):
        check_content(tmp_path, shard, Manifest("uint16", {"vocab_size": 100, "eod_id": EOD}, {}))


def test_manifest_round_trip(written: tuple) -> None:
    root, _, manifest = written
    (root / "manifest.json").write_text(manifest.to_json())
    assert load_manifest(root) == manifest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        ('{"format": "other"}', "format lit_msar.tokens"),
        ('{"format": "lit_msar.tokens", "version": 99}', "version 99, this code reads 1"),
        ('{"format": "lit_msar.tokens", "version": 1}', "splits"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=rf"manifest.json: not a manifest of prepared data.*{message}|{message}"):
        load_manifest(tmp_path)


def test_safe_names_are_distinct_and_safe() -> None:
    taken: set[str] = set()
    for name in ("Wikipedia (en)", "wikipedia EN", "../../etc", "日本", "Gutenberg (PG-19)", "x" * 300):
        slug = safe_name(name, taken)
        assert slug not in taken
        assert slug.replace("-", "").isalnum()
        assert len(slug) < 60
        taken.add(slug)
    assert "wikipedia-en-2" in taken
