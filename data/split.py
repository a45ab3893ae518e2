"""Samples of one split of a prepared directory, read from its shards as NumPy arrays."""

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import numpy as np

from data.packing import DocumentPacking
from data.shards import Manifest, Shard, ShardSet

IGNORE = -100  # a target that is masked
OPEN_FILES = 128  # shards held open by one thread
RETRY_SECONDS = (0.5, 2.0, 8.0)  # waits before a file that cannot be read is given up


class OpenFile:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class ShardFiles:
    """Reads token ranges of shards with `pread`, from any number of threads, a bounded number of files open in each.

    Not `mmap`: mapped pages would count as the loader's memory as they are touched, and a file that shrinks or a
    network disk that fails would end the process with a bus error where this raises.
    """

    def __init__(self, root: str | os.PathLike, dtype: str) -> None:
        self.root = Path(root)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._threads = threading.local()

    @property
    def _open(self) -> OrderedDict[str, OpenFile]:
        """Files of this thread, the least recently used first; another thread must not close what this one reads."""
        if not hasattr(self._threads, "open"):
            self._threads.open = OrderedDict()
        return self._threads.open

    def read(self, shard: Shard, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of a shard, [count] in the shard's dtype.

        Raises:
            FileNotFoundError, OSError, ValueError: after retries; names the file.
        """
        out = np.empty(count, dtype=self.dtype)
        for wait in (*RETRY_SECONDS, None):
            try:
                got = os.preadv(self._file(shard).fd, [memoryview(out).cast("B")], start * self.dtype.itemsize)
                if got == out.nbytes:
                    return out
                error: Exception = ValueError(
                    f"{self.root / shard.path}.bin: truncated, it ends at byte {start * self.dtype.itemsize + got}; "
                    "restore the file"
                )
            except OSError as e:
                reason = f"{self.root / shard.path}.bin: cannot be read ({e.strerror}); restore the file and resume"
                error = FileNotFoundError(reason) if isinstance(e, FileNotFoundError) else OSError(e.errno, reason)
            if wait is None:
                raise error
            self._open.pop(shard.path, None)  # open it again
            time.sleep(wait)
        raise AssertionError("the loop returns or raises")

    def _file(self, shard: Shard) -> OpenFile:
        files = self._open
        if shard.path in files:
            files.move_to_end(shard.path)
        else:
            if len(files) >= OPEN_FILES:
                files.popitem(last=False)
            files[shard.path] = OpenFile(self.root / (shard.path + ".bin"))
        return files[shard.path]

    def __getstate__(self) -> dict:
        return {"root": self.root, "dtype": self.dtype}  # files do not travel to another process

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _threads=threading.local())


class TokenSplit:
    """The samples of one split: `seq_len` inputs and as many targets each.

    With `chunk` packing each shard is one string of tokens, documents back to back; sample j starts at token j *
    seq_len, so every token is a target once, but for a shard's first. With `document` packing a sample holds whole
    documents, and only a document that is longer than a sample is cut.

    Args:
        root: the prepared directory.
        manifest: its manifest.
        split: `train` or `val`.
        seq_len: tokens of a sample.
        packing: `chunk` or `document`.
        index_dir: where `document` packing keeps the sample starts it computes; the prepared directory by default.
    Attributes:
        sets: the split's sets; `sizes` the samples of each.
    Raises:
        ValueError: the split's shards are all shorter than a sample.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        manifest: Manifest,
        split: str,
        seq_len: int,
        packing: Literal["chunk", "document"] = "chunk",
        index_dir: str | os.PathLike | None = None,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        if packing not in ("chunk", "document"):
            raise ValueError(f"packing must be chunk or document, got {packing!r}")
        self.seq_len = seq_len
        self.eod_id = manifest.tokenizer["eod_id"]
        self.sets: list[ShardSet] = manifest.splits.get(split, [])
        self.files = ShardFiles(root, manifest.dtype)
        longest = max((shard.tokens for s in self.sets for shard in s.shards), default=0)
        if self.sets and split == "train" and longest < seq_len + 1:
            raise ValueError(
                f"seq_len={seq_len} is longer than the data: "
                f"the longest shard of {split} in {root} has {longest} tokens"
            )
        self._packed: dict[str, DocumentPacking] = {}
        if packing == "document":
            folder = Path(index_dir or root)
            for shard in (shard for s in self.sets for shard in s.shards):
                self._packed[shard.path] = DocumentPacking(self.files.root, shard, seq_len, folder)
        self._bounds = [
            np.cumsum([0, *map(self._n_samples, s.shards)]) for s in self.sets
        ]  # first sample of each shard
        self.sizes = [int(b[-1]) for b in self._bounds]

    def _n_samples(self, shard: Shard) -> int:
        if self._packed:
            return len(self._packed[shard.path])
        return -(-(shard.tokens - 1) // self.seq_len)

    def span(self, set_index: int, sample: int) -> tuple[Shard, int, int]:
        """Shard, first token and number of tokens (at most seq_len + 1) of a sample of a set."""
        bounds = self._bounds[set_index]
        k = int(np.searchsorted(bounds, sample, side="right")) - 1
        shard, j = self.sets[set_index].shards[k], int(sample - bounds[k])
        if self._packed:
            return shard, *self._packed[shard.path].span(j)
        start = j * self.seq_len
        return shard, start, min(self.seq_len + 1, shard.tokens - start)

    def batch(self, sets: np.ndarray, samples: np.ndarray, with_position: bool = False) -> dict[str, np.ndarray]:
        """Samples as arrays; a set of -1 gives a fully masked row.

        Args:
            sets: [B] index of each sample's set in `sets`.
            samples: [B] sample within the set.
            with_position: also give each token's position in its document, counted from where the sample begins to show
                it.
        Returns:
            `tokens` [B, T] int64, `targets` [B, T] int64 with -100 where masked, and `position` [B, T] int64 where
            asked for. Padding has the end-of-document id, a masked target, and position 0.
        """
        n, t = len(sets), self.seq_len
        # One allocation for both: the allocator hands two of half a megabyte back to the system each time, and the page
        # faults of getting them again are most of the loading time.
        tokens, targets = np.empty((2, n, t), dtype=np.int64)
        position = np.zeros((n, t), dtype=np.int64) if with_position else None
        for row in range(n):
            count = 0
            if sets[row] >= 0:
                shard, start, count = self.span(int(sets[row]), int(samples[row]))
                raw = self.files.read(shard, start, count)
                tokens[row, :count] = raw[:t]
                targets[row, : count - 1] = raw[1:]
                if position is not None:
                    position[row, :count] = positions_in_documents(raw[:t], self.eod_id)
            # A padded sample shows its last token too; nothing follows it, so its target is masked.
            tokens[row, count:] = self.eod_id
            targets[row, max(count - 1, 0) :] = IGNORE
        return {"tokens": tokens, "targets": targets} | ({} if position is None else {"position": position})


def positions_in_documents(tokens: np.ndarray, eod_id: int) -> np.ndarray:
    """Position of each token in its document, counted from the first token given. [n] -> [n] int64."""
    starts = np.flatnonzero(tokens == eod_id) + 1
    index = np.arange(len(tokens), dtype=np.int64)
    starts = starts[starts < len(tokens)]
    if not len(starts):
        return index
    first = np.zeros(len(tokens), dtype=np.int64)
    first[starts] = starts
    return index - np.maximum.accumulate(first)
