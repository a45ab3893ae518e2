"""Hashes checked once: a record beside the manifest lets later starts skip shards that have not changed."""

import json
import os
from pathlib import Path

from data.progress import each
from data.shards import Manifest, Shard, check_hash, check_sizes

RECORD = ".verified.json"


def verify_once(root: str | os.PathLike, manifest: Manifest, shards: list[Shard] | None = None) -> int:
    """Checks all sizes, and the hashes of shards not known unchanged; returns how many were hashed.

    A shard is unchanged while its files' sizes and modification times are those of the last check.

    Args:
        root: the prepared directory.
        shards: those to check; all by default.
    Raises:
        FileNotFoundError, ValueError: a shard is missing, truncated or damaged; names the file.
    """
    root = Path(root)
    shards = manifest.shards() if shards is None else shards
    check_sizes(root, manifest, shards)
    known = _read(root)
    stamps = {shard.path: _stamp(root, shard) for shard in shards}
    todo = [shard for shard in shards if known.get(shard.path) != stamps[shard.path]]
    sizes = [shard.tokens * manifest.token_bytes for shard in todo]
    # Threads: hashing releases the interpreter lock.
    each(
        "checking shards", todo, lambda s: check_hash(root, s, manifest.token_bytes), sizes, min(8, os.cpu_count() or 1)
    )
    if todo:
        _write(root, known | stamps)
    return len(todo)


def record_verified(root: str | os.PathLike, shards: list[Shard]) -> None:
    """Notes that shards are good, where they were hashed while being written."""
    root = Path(root)
    _write(root, _read(root) | {shard.path: _stamp(root, shard) for shard in shards})


def _stamp(root: Path, shard: Shard) -> list:
    stamp: list = [shard.sha256]
    for suffix in (".bin", ".idx"):
        stat = os.stat(root / (shard.path + suffix))
        stamp += [stat.st_size, stat.st_mtime_ns]
    return stamp


def _read(root: Path) -> dict:
    try:
        record = json.loads((root / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write(root: Path, record: dict) -> None:
    if not os.access(root, os.W_OK):
        return  # read-only data: hashed at every start
    draft = root / f"{RECORD}.{os.getpid()}"
    draft.write_text(json.dumps(record))
    os.replace(draft, root / RECORD)
