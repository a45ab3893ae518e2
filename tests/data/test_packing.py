"""Document packing shows every token, cuts only long documents, and keeps its index."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.packing import DocumentPacking, pack_documents
from data.shards import IDX_DTYPE, Shard, hash_file


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=40), seq_len=st.integers(1, 30))
@example(lengths=[5, 5, 5], seq_len=9)
def test_every_token_is_shown_and_only_long_documents_are_cut(lengths: list[int], seq_len: int) -> None:
    starts = np.cumsum([0, *lengths])
    spans = pack_documents(starts, seq_len + 1)
    targets = np.zeros(starts[-1], dtype=int)
    shown = np.zeros(starts[-1], dtype=int)
    for start, count in spans:
        assert 1 <= count <= seq_len + 1
        shown[start : start + count] += 1
        targets[start + 1 : start + count] += 1
    assert shown.min() == 1
    assert targets.max() == 1
    for start, length in zip(starts[:-1], lengths, strict=True):
        if length <= seq_len + 1:  # whole: within one sample
            assert any(s <= start and start + length <= s + c for s, c in spans)
        assert (targets[start + 1 : start + length] == 1).all()
    ends = [s + c for s, c in spans]
    # a sample is closed only when the next document does not fit
    for (start, _), end in zip(spans, ends, strict=True):
        nxt = np.searchsorted(starts, end)
        if nxt < len(lengths) and starts[nxt] == end and start in starts:
            assert end + lengths[nxt] - start > seq_len + 1


def make_shard(root: Path, starts: list[int]) -> Shard:
    (root / "train").mkdir(exist_ok=True)
    np.array(starts, dtype=IDX_DTYPE).tofile(root / "train/s.idx")
    return Shard("train/s", starts[-1], len(starts) - 1, 0, "", hash_file(root / "train/s.idx"))


def test_index_is_computed_once_and_again_for_another_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = make_shard(tmp_path, [0, 5, 9, 20])
    first = DocumentPacking(tmp_path, shard, 9, tmp_path)
    assert [first.span(i) for i in range(len(first))] == [(0, 9), (9, 10), (18, 2)]
    with monkeypatch.context() as patch:
        patch.setattr("data.packing.pack_documents", None)
        again = DocumentPacking(tmp_path, shard, 9, tmp_path)
    assert len(again) == 3
    other = DocumentPacking(tmp_path, make_shard(tmp_path, [0, 4, 30]), 9, tmp_path)
    assert other.span(len(other) - 1)[0] + other.span(len(other) - 1)[1] == 30


def test_data_sets_that_share_a_folder_keep_their_own_indices(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    shards = [make_shard(roots[0], [0, 5, 9, 20]), make_shard(roots[1], [0, 3, 20])]  # as many tokens
    a, b = (DocumentPacking(root, shard, 9, tmp_path) for root, shard in zip(roots, shards, strict=True))
    assert [a.span(i) for i in range(len(a))] == [(0, 9), (9, 10), (18, 2)]
    assert b.span(0) == (0, 3)


def test_index_goes_beside_the_data_or_elsewhere(tmp_path: Path) -> None:
    shard = make_shard(tmp_path, [0, 5, 9])
    DocumentPacking(tmp_path, shard, 4, tmp_path / "cache")
    assert [f.name for f in (tmp_path / "cache/train").iterdir()] == [f"s.{shard.idx_sha256[:12]}.pack-4.npy"]
    assert [f.name for f in (tmp_path / "train").iterdir()] == ["s.idx"]
