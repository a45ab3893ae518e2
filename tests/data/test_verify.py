"""A shard is hashed once, and again when its file has changed."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.shards import Manifest, ShardWriter
from data.verify import RECORD, record_verified, verify_once


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Manifest]:
    root = tmp_path / "data"
    writer = ShardWriter(root, "a", "train/a", "uint16", 4)
    writer.append(np.arange(12, dtype=np.uint16), np.array([4, 4, 4]), np.array([4, 4, 4]))
    return root, Manifest("uint16", {}, {"train": [writer.finish()]})


def test_second_check_hashes_nothing_and_a_change_is_seen(data: tuple) -> None:
    root, manifest = data
    assert verify_once(root, manifest) == 3
    assert verify_once(root, manifest) == 0
    file = root / "train/a/shard-00001.bin"
    os.utime(file)
    assert verify_once(root, manifest) == 1
    good = file.read_bytes()
    file.write_bytes(b"\x01" + good[1:])
    with pytest.raises(ValueError, match=r"shard-00001.bin: damaged"):
        verify_once(root, manifest)
    with pytest.raises(ValueError, match=r"shard-00001.bin: damaged"):  # a failure is not recorded
        verify_once(root, manifest)


def test_record_of_a_copy_does_not_count(data: tuple, tmp_path: Path) -> None:
    root, manifest = data
    record_verified(root, manifest.shards())
    assert verify_once(root, manifest) == 0
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)  # copies have times of their own
    assert verify_once(tmp_path / "copy", manifest) == 3


def test_record_that_is_no_record_is_ignored(data: tuple) -> None:
    root, manifest = data
    (root / RECORD).write_text("[broken")
    assert verify_once(root, manifest) == 3


def test_only_the_shards_asked_for_are_checked(data: tuple) -> None:
    root, manifest = data
    (root / "train/a/shard-00002.bin").unlink()
    assert verify_once(root, manifest, manifest.shards()[:2]) == 2
    with pytest.raises(FileNotFoundError, match=r"shard-00002.bin: missing"):
        verify_once(root, manifest)
