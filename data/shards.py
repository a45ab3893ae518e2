"""The shard format: `manifest.json`, and per shard a `.bin` of token ids and a `.idx` of document starts.

    DIR/manifest.json                       what the directory holds; written last
    DIR/tokenizer.model | tokenizer.json    the tokenizer that made it
    DIR/train/<set>/shard-00000.bin         token ids, little-endian uint16 or uint32; every document ends with one eod
    id DIR/train/<set>/shard-00000.idx         little-endian uint64: start of each document, then the number of tokens

A document never spans two shards.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

FORMAT = "lit_msar.tokens"
VERSION = 1
SHARD_TOKENS = 1 << 27  # 256 MiB of uint16: few files at a terabyte, and one remote shard is quick to fetch
IDX_DTYPE = np.dtype("<u8")
REMEDY = "restore the file, or remove the directory and prepare the data again"


@dataclass
class Shard:
    """One pair of files. `path` is relative to the prepared directory, without suffix; `bytes` counts UTF-8 text."""

    path: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    idx_sha256: str


@dataclass
class ShardSet:
    """The shards of one `pile_set_name` in one split."""

    name: str
    path: str
    shards: list[Shard] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)

    @property
    def documents(self) -> int:
        return sum(s.documents for s in self.shards)

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.shards)


@dataclass
class Manifest:
    """What a prepared directory holds.

    Attributes:
        dtype: `uint16` or `uint32`.
        tokenizer: file, kind, sha256, vocab_size, eod_id, eod_token.
        splits: sets by split name (`train`, `val`), sorted by set name.
        inputs: name, split, size, sha256, documents of each input.
        counts: documents, empty (dropped), and skipped lines by reason.
        options: the options that shaped the output.
    """

    dtype: str
    tokenizer: dict
    splits: dict[str, list[ShardSet]]
    inputs: list[dict] = field(default_factory=list)
    counts: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def set_names(self) -> list[str]:
        """Names of all sets of all splits, sorted."""
        return sorted({s.name for sets in self.splits.values() for s in sets})

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    def shards(self) -> list[Shard]:
        return [shard for sets in self.splits.values() for s in sets for shard in s.shards]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "Manifest":
        """Parses a manifest; `where` names its file in errors."""
        try:
            raw = json.loads(text)
            if raw.pop("format", None) != FORMAT:
                raise ValueError("it does not say format " + FORMAT)
            version = raw.pop("version", None)
            if version != VERSION:
                raise ValueError(f"it has version {version}, this code reads {VERSION}")
            splits = {
                name: [ShardSet(s["name"], s["path"], [Shard(**x) for x in s["shards"]]) for s in sets]
                for name, sets in raw.pop("splits").items()
            }
            manifest = cls(splits=splits, **raw)
            if manifest.dtype not in ("uint16", "uint32"):
                raise ValueError(f"dtype {manifest.dtype} is neither uint16 nor uint32")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ValueError(f"{where}: not a manifest of prepared data ({e}); prepare the data again") from e
        return manifest


def load_manifest(path: str | os.PathLike) -> Manifest:
    """Reads `DIR/manifest.json`.

    Raises:
        FileNotFoundError: the directory or its manifest is missing.
        ValueError: the manifest is damaged or of another version.
    """
    file = Path(path) / "manifest.json"
    if not file.is_file():
        what = "has no manifest.json" if Path(path).is_dir() else "does not exist"
        raise FileNotFoundError(f"data {path}: {what}; make it with `python -m lit_msar prepare --output {path}`")
    return Manifest.from_json(file.read_bytes(), str(file))


def safe_name(name: str, taken: set[str]) -> str:
    """A directory name for a set: lower-case letters, digits and dashes, with a number where two names meet."""
    base = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48] or "set"
    slug, n = base, 1
    while slug in taken:
        n += 1
        slug = f"{base}-{n}"
    return slug


def hash_file(path: str | os.PathLike, limit: int | None = None) -> str:
    """SHA-256 of a file, or of its first `limit` bytes."""
    digest = hashlib.sha256()
    left = limit if limit is not None else 1 << 62
    with open(path, "rb") as f:
        while left > 0 and (block := f.read(min(1 << 20, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def check_size(root: str | os.PathLike, shard: Shard, token_bytes: int) -> None:
    """Raises FileNotFoundError or ValueError where a shard's files are missing or not as long as the manifest says."""
    for suffix, size in ((".bin", shard.tokens * token_bytes), (".idx", (shard.documents + 1) * IDX_DTYPE.itemsize)):
        file = Path(root) / (shard.path + suffix)
        try:
            found = file.stat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: missing; {REMEDY}") from None
        if found != size:
            kind = "empty" if found == 0 else "truncated" if found < size else "too long"
            raise ValueError(f"{file}: {kind}, it ends at byte {found} instead of {size}; {REMEDY}")


def check_sizes(root: str | os.PathLike, manifest: Manifest, shards: list[Shard] | None = None) -> None:
    """`check_size` of each of `shards`, all by default: what a command does before it reads prepared data."""
    for shard in manifest.shards() if shards is None else shards:
        check_size(root, shard, manifest.token_bytes)


def check_hash(root: str | os.PathLike, shard: Shard, token_bytes: int) -> None:
    """As `check_size`, and raises ValueError where the content does not have the manifest's SHA-256."""
    check_size(root, shard, token_bytes)
    for suffix, digest in ((".bin", shard.sha256), (".idx", shard.idx_sha256)):
        file = Path(root) / (shard.path + suffix)
        if hash_file(file) != digest:
            raise ValueError(f"{file}: damaged, its SHA-256 is not the manifest's; {REMEDY}")


def check_content(root: str | os.PathLike, shard: Shard, manifest: Manifest) -> None:
    """As `check_hash`, and checks ids, document starts and that each document ends with its only end-of-document id."""
    check_hash(root, shard, manifest.token_bytes)
    base = Path(root) / shard.path
    starts = np.fromfile(f"{base}.idx", dtype=IDX_DTYPE)
    if starts[0] != 0 or starts[-1] != shard.tokens or (np.diff(starts.astype(np.int64)) < 1).any():
        raise ValueError(f"{base}.idx: document starts do not rise from 0 to {shard.tokens}; prepare the data again")
    tokens = np.memmap(f"{base}.bin", dtype=np.dtype(manifest.dtype).newbyteorder("<"), mode="r")
    ends = [np.empty(0, dtype=np.int64)]
    for at in range(0, len(tokens), 1 << 22):  # 4M tokens at a time: bounded memory
        block = tokens[at : at + (1 << 22)]
        if int(block.max()) >= manifest.tokenizer["vocab_size"]:
            raise ValueError(
                f"{base}.bin: id {int(block.max())} is outside the tokenizer's {manifest.tokenizer['vocab_size']} ids"
            )
        ends.append(np.flatnonzero(block == manifest.tokenizer["eod_id"]) + at + 1)
    if not np.array_equal(np.concatenate(ends), starts[1:].astype(np.int64)):
        raise ValueError(
            f"{base}.bin: end-of-document ids do not match the document starts of the .idx; prepare the data again"
        )


class ShardWriter:
    """Appends documents of one set to shards, and can say where it stands and continue from there."""

    def __init__(self, root: str | os.PathLike, name: str, path: str, dtype: str, shard_tokens: int) -> None:
        self.root = Path(root)
        self.set = ShardSet(name, path)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.shard_tokens = shard_tokens
        self._files: list = []  # the open .bin and .idx
        self._open = Shard("", 0, 0, 0, "", "")
        self._digests: list = []
        (self.root / path).mkdir(parents=True, exist_ok=True)

    def append(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: np.ndarray) -> None:
        """Appends documents; a shard is closed before the one that would make it longer than `shard_tokens`.

        Args:
            tokens: [n_tokens], the documents one after another, each with its end-of-document id.
            lengths: [n_documents] tokens of each.
            text_bytes: [n_documents] UTF-8 bytes of each document's text.
        """
        ends = np.cumsum(lengths)
        first = 0  # the first document not yet written
        while first < len(lengths):
            base = int(ends[first - 1]) if first else 0
            room = self.shard_tokens - self._open.tokens
            last = int(np.searchsorted(ends, base + room, side="right"))  # documents [first, last) fit
            if last <= first:
                if self._open.tokens:
                    self._close()
                    continue
                last = first + 1  # longer than a whole shard: it gets one of its own
            self._write(tokens[base : int(ends[last - 1])], lengths[first:last], int(text_bytes[first:last].sum()))
            first = last

    def _write(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: int) -> None:
        if not self._files:
            self._start()
        starts = (self._open.tokens + np.cumsum(lengths) - lengths).astype(IDX_DTYPE)
        for file, digest, array in zip(
            self._files, self._digests, (tokens.astype(self.dtype, copy=False), starts), strict=True
        ):
            digest.update(memoryview(array).cast("B"))
            file.write(memoryview(array).cast("B"))
        self._open.tokens += len(tokens)
        self._open.documents += len(lengths)
        self._open.bytes += text_bytes

    def _start(self) -> None:
        path = f"{self.set.path}/shard-{len(self.set.shards):05d}"
        self._open = Shard(path, 0, 0, 0, "", "")
        self._files = [open(self.root / (path + suffix), "wb") for suffix in (".bin", ".idx")]
        self._digests = [hashlib.sha256(), hashlib.sha256()]

    def _close(self) -> None:
        end = np.array([self._open.tokens], dtype=IDX_DTYPE).tobytes()
        self._files[1].write(end)
        self._digests[1].update(end)
        self.sync()
        for file in self._files:
            file.close()
        self._open.sha256, self._open.idx_sha256 = (d.hexdigest() for d in self._digests)
        self.set.shards.append(self._open)
        self._files, self._open = [], Shard("", 0, 0, 0, "", "")

    def finish(self) -> ShardSet:
        """Closes the open shard and returns the set."""
        if self._files:
            self._close()
        return self.set

    def abandon(self) -> None:
        """Closes the files as they are."""
        for file in self._files:
            file.close()

    def sync(self) -> None:
        """Puts what was appended on the disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def state(self) -> dict:
        """Where the writer stands, for `restore`; call `sync` first."""
        return {"set": asdict(self.set), "open": asdict(self._open)}

    def restore(self, state: dict) -> None:
        """Continues from `state`: bytes written after it are cut off."""
        self.set = ShardSet(state["set"]["name"], state["set"]["path"], [Shard(**s) for s in state["set"]["shards"]])
        opened = Shard(**state["open"])
        if not opened.path:
            return
        self._open, self._files, self._digests = opened, [], []
        for suffix, size in (
            (".bin", opened.tokens * self.dtype.itemsize),
            (".idx", opened.documents * IDX_DTYPE.itemsize),
        ):
            file = open(self.root / (opened.path + suffix), "r+b")
            file.truncate(size)
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
            self._files.append(file)
            self._digests.append(digest)
