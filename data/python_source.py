"""The embedded default corpus: Python sources of this machine in the Pile's format, one document a file."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data.inputs import BLOCK, Block, cut_blocks

MIN_BYTES, MAX_BYTES = 256, 1 << 18  # of one file: stubs and generated tables teach nothing
CAPS = {
    "Python standard library": 16 << 20,
    "Python packages": 24 << 20,
}  # bytes of a set; prepared within a minute on two cores


class PythonInput:
    """Python files of one root, chosen and ordered by the hash of their path up to a number of bytes."""

    is_text = False

    def __init__(self, set_name: str, root: Path, max_bytes: int) -> None:
        self.name = f"python:{set_name}"
        self.set_name = set_name
        self.root = root
        self.files: list[tuple[str, int]] = []  # path below root and bytes
        self.size = 0
        for path, size in sorted(_python_files(root), key=lambda f: hashlib.sha256(f[0].encode()).digest()):
            if self.size + size <= max_bytes:
                self.files.append((path, size))
                self.size += size
        self._digest = hashlib.sha256()
        self._done = 0

    def identity(self) -> dict:
        listing = hashlib.sha256(json.dumps(self.files).encode())
        return {"name": self.name, "size": self.size, "head": listing.hexdigest()}

    def sha256(self) -> str:
        """Of the JSON lines, once `blocks()` is exhausted."""
        return self._digest.hexdigest()

    def blocks(self) -> Iterator[Block]:
        self._digest = hashlib.sha256()
        self._done = 0
        return cut_blocks(self.name, self._lines(), lambda: self._done, BLOCK)

    def _lines(self) -> Iterator[bytes]:
        for path, size in self.files:
            self._done += size
            try:
                text = (self.root / path).read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue  # a source in another encoding, as PEP 263 allows
            document = {"text": text, "meta": {"pile_set_name": self.set_name, "path": path}}
            line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
            self._digest.update(line)
            yield line


def python_inputs() -> list[PythonInput]:
    """The standard library and the installed packages of the running interpreter.

    Raises:
        ValueError: neither holds a Python source (a frozen or zipped interpreter).
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    inputs = [PythonInput(name, root, CAPS[name]) for name, root in zip(CAPS, (stdlib, packages), strict=True)]
    inputs = [i for i in inputs if i.files]
    if not inputs:
        raise ValueError(f"source python: no Python files below {stdlib} and {packages}; give --input instead")
    return inputs


def _python_files(root: Path) -> Iterator[tuple[str, int]]:
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "lib2to3"}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skip)
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path) and MIN_BYTES <= os.path.getsize(path) <= MAX_BYTES:
                yield os.path.relpath(path, root), os.path.getsize(path)
