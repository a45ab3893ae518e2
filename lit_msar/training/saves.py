"""Checkpoints on disk: what is complete, which is the newest, and how one appears and disappears in a single rename.

A save is written under a name that ends in `.unfinished` and renamed when all of it is on disk. A sharded one is a
directory whose manifest.json lists its files and their bytes, so that a copy that broke off is known as well.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
LAST = "last.ckpt"
_NAME = re.compile(r"step=(\d+)\.ckpt")


def save_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step lies."""
    return directory / f"step={step}.ckpt"


def unfinished_path(final: Path) -> Path:
    """Where it is written."""
    return final.with_name(final.name + UNFINISHED)


def finish(final: Path, manifest: dict[str, Any]) -> None:
    """Make a written checkpoint complete: manifest (of a directory), everything to the disk, rename, `last.ckpt`."""
    unfinished = unfinished_path(final)
    if unfinished.is_dir():
        files = {str(f.relative_to(unfinished)): f.stat().st_size for f in sorted(unfinished.rglob("*")) if f.is_file()}
        (unfinished / MANIFEST).write_text(json.dumps(manifest | {"files": files}, indent=1) + "\n")
    _sync(unfinished)
    if final.exists():  # the same step, reached again after a resume from an earlier one
        remove(final)
    os.rename(unfinished, final)
    link = final.with_name(LAST + UNFINISHED)
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, final.with_name(LAST))
    _sync(final.parent, inside=False)


def _sync(path: Path, inside: bool = True) -> None:
    for entry in [*path.rglob("*"), path] if inside and path.is_dir() else [path]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a checkpoint; what a crash leaves of it counts as unfinished."""
    leaving = path if path.name.endswith(UNFINISHED) else path.with_name(f"{path.name}.old{UNFINISHED}")
    if leaving != path:
        os.replace(path, leaving)
    shutil.rmtree(leaving) if leaving.is_dir() else leaving.unlink()


def prune(directory: Path, keep_last: int, keep_every: int | None, keep: Path) -> None:
    """Delete leftovers and old saves; the `keep_last` newest (-1: all), every `keep_every`-th step and `keep` stay."""
    for leftover in unfinished(directory):
        remove(leftover)
    saves = sorted(complete(directory), key=lambda path: path.stat().st_mtime_ns)
    for path in saves[:-keep_last] if keep_last > 0 else []:
        if path != keep and not (keep_every and step_of(path) % keep_every == 0):
            remove(path)


def step_of(path: Path) -> int:
    """Optimizer step of a checkpoint, by its name."""
    return int(_NAME.fullmatch(path.name)[1])


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints, by step."""
    return sorted((path for path in _saves(directory) if not defect(path)), key=step_of)


def unfinished(directory: Path) -> list[Path]:
    """What interrupted saves and deletions left behind."""
    return sorted(directory.glob(f"*{UNFINISHED}"))


def _saves(directory: Path) -> Iterator[Path]:
    return (path for path in directory.glob("step=*.ckpt") if _NAME.fullmatch(path.name))


def defect(path: Path) -> str:
    """What a checkpoint lacks to be complete; empty for a complete one."""
    if not path.is_dir():
        return "" if zipfile.is_zipfile(path) else "it is cut off"
    if not (path / MANIFEST).is_file():
        return f"no {MANIFEST}"
    for name, size in json.loads((path / MANIFEST).read_text())["files"].items():
        if not (path / name).is_file():
            return f"no {name}"
        if (path / name).stat().st_size != size:
            return f"{name} has {(path / name).stat().st_size} bytes instead of {size}"
    return ""


def newest(directory: Path) -> Path | None:
    """The checkpoint that `last` means: the one written last, or if that is not complete the highest step that is.

    Warns of every save that is not complete.
    """
    for path in unfinished(directory):
        rank_zero_warn(f"{path} is the rest of a save that was interrupted: ignored")
    for path in _saves(directory):
        if why := defect(path):
            rank_zero_warn(f"{path} is not complete ({why}): ignored")
    saves = complete(directory)
    last = (directory / LAST).resolve()
    return last if last in [path.resolve() for path in saves] else (saves[-1] if saves else None)
