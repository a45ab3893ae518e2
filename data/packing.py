"""Document-aligned packing: where each sample of a shard starts, computed once and kept in a mapped file."""

import os
from pathlib import Path

import numpy as np

from data.shards import IDX_DTYPE, Shard


class DocumentPacking:
    """Sample spans of one shard such that documents are cut only where they are longer than a sample.

    Documents are taken in order; a sample holds as many whole ones as fit in seq_len + 1 tokens. A document that does
    not fit in a sample of its own is cut into samples that overlap by one token, so that each of its tokens but the
    first is a target once.
    """

    def __init__(self, root: Path, shard: Shard, seq_len: int, folder: Path) -> None:
        # the shard by its documents: several data sets may share a folder
        self._file = folder / f"{shard.path}.{shard.idx_sha256[:12]}.pack-{seq_len}.npy"
        if not self._file.is_file():
            starts = np.fromfile(root / (shard.path + ".idx"), dtype=IDX_DTYPE).astype(np.int64)
            spans = pack_documents(starts, seq_len + 1)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_name(f"{self._file.name}.{os.getpid()}.npy")
            np.save(draft, spans)
            os.replace(draft, self._file)
        self._n = len(np.load(self._file, mmap_mode="r"))
        self._spans: np.ndarray | None = None

    def __len__(self) -> int:
        return self._n

    def span(self, sample: int) -> tuple[int, int]:
        """First token and number of tokens of a sample."""
        if self._spans is None:
            self._spans = np.load(self._file, mmap_mode="r")
        start, count = self._spans[sample]
        return int(start), int(count)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_spans": None}


def pack_documents(starts: np.ndarray, room: int) -> np.ndarray:
    """Start and length of each sample.

    Args:
        starts: [documents + 1] start of each document and the end of the last.
        room: tokens of a sample, at least 2.
    Returns:
        [samples, 2] int64; lengths between 1 and `room`.
    """
    spans: list[tuple[int, int]] = []
    end, document = int(starts[-1]), 0
    while document < len(starts) - 1:
        start = int(starts[document])
        fits = int(np.searchsorted(starts, start + room, side="right")) - 1  # the document that no longer fits whole
        if fits > document:
            spans.append((start, int(starts[fits]) - start))
            document = fits
            continue
        stop = int(starts[document + 1])
        while start + 1 < stop:
            count = min(room, stop - start)
            spans.append((start, count))
            start += count - 1
        document += 1
    assert sum(spans[-1]) == end
    return np.array(spans, dtype=np.int64)
