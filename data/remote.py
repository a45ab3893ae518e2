"""Prepared data behind an fsspec URL: copied into a local cache, each file checked before it gets its name."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.progress import each
from data.shards import Manifest, Shard, check_size, hash_file, load_manifest, safe_name
from data.verify import record_verified, verify_once

DEFAULT_CACHE = "~/.cache/lit_msar/data"
RETRY_SECONDS = (0.5, 2.0, 8.0)  # waits before a transfer is given up
TRANSFERS = 8  # files fetched at once


def is_remote(path: str) -> bool:
    """Whether `path` is an fsspec URL such as s3://bucket/data."""
    return "://" in path


def cache_root(url: str, cache_dir: str | None) -> Path:
    """Where the copy of `url` lives; one directory for each URL."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return Path(cache_dir or DEFAULT_CACHE).expanduser() / f"{safe_name(url, set())}-{digest}"


def fetch_manifest(url: str, cache_dir: str | None = None) -> Path:
    """Copies manifest and tokenizer of `url`, and returns the local directory.

    Raises:
        FileNotFoundError, OSError: they cannot be fetched; names the URL.
        ValueError: no manifest, or a tokenizer that is not the manifest's.
    """
    root = cache_root(url, cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        _fetch(url, root, "manifest.json", None)
        tokenizer = load_manifest(root).tokenizer
        file = root / tokenizer["file"]
        if not (file.is_file() and hash_file(file) == tokenizer["sha256"]):
            _fetch(url, root, tokenizer["file"], tokenizer["sha256"])
    return root


def fetch_shards(url: str, root: Path, manifest: Manifest, shards: list[Shard]) -> None:
    """Copies the shards that the cache lacks, all of them (a shuffled order soon touches each), and checks the rest.

    Raises:
        FileNotFoundError, OSError: a file cannot be fetched after retries; names the URL.
        ValueError: what arrives does not have the manifest's SHA-256 after retries; names the URL.
    """

    def fetch(shard: Shard) -> None:
        try:
            check_size(root, shard, manifest.token_bytes)
        except (FileNotFoundError, ValueError):
            _fetch(url, root, shard.path + ".bin", shard.sha256)
            _fetch(url, root, shard.path + ".idx", shard.idx_sha256)
            fetched.append(shard)

    fetched: list[Shard] = []
    sizes = [shard.tokens * manifest.token_bytes for shard in shards]
    with _locked(root):
        each("fetching shards", shards, fetch, sizes, TRANSFERS)
        record_verified(root, fetched)  # hashed on arrival
        verify_once(root, manifest, shards)


def _fetch(url: str, root: Path, name: str, sha256: str | None) -> None:
    """Copies one file under its name, whole and right or not at all."""
    import fsspec

    source, target = f"{url.rstrip('/')}/{name}", root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    for wait in (*RETRY_SECONDS, None):
        try:
            digest = hashlib.sha256()
            with fsspec.open(source, "rb") as remote, open(draft, "wb") as local:
                while block := remote.read(1 << 22):
                    digest.update(block)
                    local.write(block)
                local.flush()
                os.fsync(local.fileno())
            if sha256 is None or digest.hexdigest() == sha256:
                os.replace(draft, target)
                return
            error: Exception = ValueError(
                f"{source}: damaged, its SHA-256 is not the manifest's; upload the file again"
            )
        except FileNotFoundError:
            error = FileNotFoundError(f"{source}: no such file; is the URL that of a prepared directory?")
            wait = None if name == "manifest.json" else wait  # most likely a wrong URL
        except ImportError as e:
            raise ValueError(f"{source}: {e}") from e  # fsspec names the package that the protocol needs
        except Exception as e:  # each protocol's library has its own errors
            error = OSError(f"{source}: cannot be fetched ({type(e).__name__}: {e})")
        draft.unlink(missing_ok=True)
        if wait is None:
            raise error
        time.sleep(wait)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process at a time in a cache directory; others wait."""
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
