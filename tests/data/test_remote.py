"""Remote data arrives whole and checked, or the file's URL is named."""

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from data import remote
from data.prepare import prepare
from data.remote import cache_root, fetch_manifest, fetch_shards, is_remote
from data.shards import Manifest, load_manifest

URL = "memory://bucket/data"


@pytest.fixture
def uploaded(tmp_path: Path, write_jsonl: Callable, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """A prepared directory under URL."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0.0, 0.0))
    file = write_jsonl("a.jsonl", [("Wiki", "one two"), ("Code", "three")])
    manifest = prepare(str(tmp_path / "out"), input=str(file), tokenizer=str(model_file), split="val=0", workers=1)
    fs = fsspec.filesystem("memory")
    fs.rm("/bucket", recursive=True) if fs.exists("/bucket") else None
    fs.put(str(tmp_path / "out"), "/bucket/data", recursive=True)
    return manifest


def test_data_arrives_once(uploaded: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fetch_manifest(URL, str(tmp_path / "cache"))
    assert load_manifest(root) == uploaded
    fetch_shards(URL, root, uploaded, uploaded.shards())
    for shard in uploaded.shards():
        for suffix in (".bin", ".idx"):
            name = shard.path + suffix
            assert (root / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    monkeypatch.setattr(fsspec, "open", None)  # no transfer the second time
    fetch_shards(URL, root, uploaded, uploaded.shards())
    assert not list(root.rglob("*.part"))


def test_a_cached_tokenizer_of_earlier_data_is_replaced(uploaded: Manifest, tmp_path: Path) -> None:
    root = fetch_manifest(URL, str(tmp_path / "cache"))
    file = root / uploaded.tokenizer["file"]
    good = file.read_bytes()
    file.write_bytes(b"of other data")
    fetch_manifest(URL, str(tmp_path / "cache"))
    assert file.read_bytes() == good


def test_damaged_transfer_is_named_and_leaves_no_file(uploaded: Manifest, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    name = uploaded.shards()[0].path + ".bin"
    good = fs.cat(f"/bucket/data/{name}")
    fs.pipe(f"/bucket/data/{name}", bytes([good[0] ^ 1]) + good[1:])
    root = fetch_manifest(URL, str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=f"{URL}/{name}: damaged"):
        fetch_shards(URL, root, uploaded, uploaded.shards())
    assert not (root / name).exists()
    assert not list(root.rglob("*.part"))


def test_truncated_and_changed_cache_files_are_replaced_or_named(uploaded: Manifest, tmp_path: Path) -> None:
    root = fetch_manifest(URL, str(tmp_path / "cache"))
    fetch_shards(URL, root, uploaded, uploaded.shards())
    file = root / (uploaded.shards()[0].path + ".bin")
    good = file.read_bytes()
    file.write_bytes(good[:-2])
    fetch_shards(URL, root, uploaded, uploaded.shards())
    assert file.read_bytes() == good
    file.write_bytes(good[:-1] + b"\xff")
    with pytest.raises(ValueError, match="damaged"):
        fetch_shards(URL, root, uploaded, uploaded.shards())


def test_transfer_that_fails_once_is_repeated(
    uploaded: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_remote, failures = fsspec.open, iter([True, True])

    def flaky(*args: object) -> object:
        if next(failures, False):
            raise OSError("connection reset")
        return open_remote(*args)

    monkeypatch.setattr(fsspec, "open", flaky)
    assert load_manifest(fetch_manifest(URL, str(tmp_path / "cache"))) == uploaded


def test_missing_files_are_named(uploaded: Manifest, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"memory://nowhere/manifest.json: no such file"):
        fetch_manifest("memory://nowhere", str(tmp_path / "cache"))
    root = fetch_manifest(URL, str(tmp_path / "cache"))
    name = uploaded.shards()[1].path
    fsspec.filesystem("memory").rm(f"/bucket/data/{name}.bin")
    with pytest.raises(FileNotFoundError, match=f"{URL}/{name}.bin: no such file"):
        fetch_shards(URL, root, uploaded, uploaded.shards())


def test_urls_have_caches_of_their_own(tmp_path: Path) -> None:
    assert is_remote("s3://bucket/data")
    assert not is_remote("/data/pile")
    names = {cache_root(url, str(tmp_path)).name for url in ("s3://a/b", "s3://a-b", "gs://a/b")}
    assert len(names) == 3
    assert cache_root("s3://a/b/", str(tmp_path)) == cache_root("s3://a/b", str(tmp_path))
