"""Input files as a stream of blocks of whole lines: `.jsonl`, `.jsonl.zst`, `.jsonl.gz` and `.txt`, in bounded memory.

Blocks are cut by content alone, so that an interrupted run finds the same blocks again.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from data.shards import hash_file

BLOCK = 1 << 20  # bytes of text in a block: a fraction of a second of tokenizing
MAX_LINE = 1 << 27  # bytes of one line: 128 MiB, so that two workers stay within 2 GiB
TXT_LIMIT = 1 << 26  # a .txt is one document up to 64 MiB, and several beyond
CHUNK = 1 << 16  # compressed bytes at once: bounds what one step of a decompressor can give
OUT = 1 << 22  # decompressed bytes of one step that are too many
HEAD = 1 << 16  # bytes of a file's beginning that identify it when a run continues
SUFFIXES = (".jsonl.zst", ".jsonl.zstd", ".json.zst", ".jsonl.gz", ".json.gz", ".jsonl", ".json", ".txt")


@dataclass(frozen=True)
class Block:
    """Whole lines of one input.

    Attributes:
        data: the bytes; for a `.txt` one document.
        line: number of the first line, from 1.
        position: bytes of the file read so far, for progress.
    """

    data: bytes
    line: int
    position: int


class Input(Protocol):
    """Something that gives blocks: a file, or the Python sources of `python_source`."""

    name: str
    size: int
    is_text: bool

    def identity(self) -> dict: ...

    def blocks(self) -> Iterator[Block]: ...

    def sha256(self) -> str: ...


class FileInput:
    """One input file. `sha256()` is that of the file, once `blocks()` is exhausted."""

    def __init__(self, path: str) -> None:
        self.name = path
        self.size = os.path.getsize(path)
        self.is_text = path.endswith(".txt")
        self._digest = hashlib.sha256()
        if self.size == 0:
            raise ValueError(f"input {path}: empty file (0 bytes); remove it from --input or restore it")

    def identity(self) -> dict:
        """What must be the same for an interrupted run to continue."""
        return {"name": self.name, "size": self.size, "head": hash_file(self.name, HEAD)}

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def blocks(self) -> Iterator[Block]:
        """Yields the file's blocks in order.

        Raises:
            ValueError: the file is truncated or damaged; names the byte.
        """
        self._digest = hashlib.sha256()
        with open(self.name, "rb") as file:
            if self.name.endswith((".zst", ".zstd")):
                chunks = _zstd_chunks(self.name, file, self._digest)
            elif self.name.endswith(".gz"):
                chunks = _gzip_chunks(self.name, file, self._digest)
            else:
                chunks = _plain_chunks(file, self._digest)
            yield from cut_blocks(self.name, chunks, file.tell, TXT_LIMIT if self.is_text else BLOCK)


def find_inputs(patterns: str | list[str] | None, option: str) -> list[FileInput]:
    """Files of paths, glob patterns and directories, each pattern's files sorted by name.

    Raises:
        FileNotFoundError: a pattern that matches nothing.
        ValueError: a file of an unknown kind, an empty one, or one named twice.
    """
    paths: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
        if os.path.isdir(pattern):
            found = sorted(str(p) for p in Path(pattern).iterdir() if p.name.endswith(SUFFIXES) and p.is_file())
        elif os.path.isfile(pattern):
            found = [pattern]
        else:
            found = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
        if not found:
            raise FileNotFoundError(
                f"{option} {pattern}: no such file, and no file matches; known kinds are {' '.join(SUFFIXES)}"
            )
        paths += found
    for path in paths:
        if not path.endswith(SUFFIXES):
            raise ValueError(f"{option} {path}: unknown kind of file; known kinds are {' '.join(SUFFIXES)}")
        if paths.count(path) > 1:
            raise ValueError(f"{option} {path}: named twice; its documents would count double")
    return [FileInput(p) for p in paths]


def cut_blocks(name: str, chunks: Iterator[bytes], position: Callable[[], int], size: int) -> Iterator[Block]:
    """Cuts a stream of bytes at the last line end before `size` bytes, or where there is none at the first after.

    Raises:
        ValueError: a line longer than 128 MiB; names input and line.
    """
    parts: list[
        bytes
    ] = []  # chunks not yet cut; joined only when a block is complete, so a long line costs linear time
    length, line, at_start = 0, 1, True
    for chunk in chunks:
        if at_start:
            chunk, at_start = chunk.removeprefix(b"\xef\xbb\xbf"), False
        parts.append(chunk)
        length += len(chunk)
        if length < size or (b"\n" not in chunk and size <= length - len(chunk) and length < MAX_LINE):
            continue
        buffer = b"".join(parts)
        start = 0
        while len(buffer) - start >= size:
            cut = buffer.rfind(b"\n", start, start + size)
            if cut < 0:
                cut = buffer.find(b"\n", start + size)
            if cut < 0:
                break
            yield Block(buffer[start : cut + 1], line, position())
            line += buffer.count(b"\n", start, cut + 1)
            start = cut + 1
        parts = [buffer[start:]]
        length = len(buffer) - start
        if length >= MAX_LINE:
            raise ValueError(f"input {name}: line {line} is longer than {MAX_LINE} bytes; split the document")
    rest = b"".join(parts)
    if rest:
        yield Block(rest, line, position())


def _plain_chunks(file: BinaryIO, digest) -> Iterator[bytes]:
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        yield chunk


def _zstd_chunks(name: str, file: BinaryIO, digest) -> Iterator[bytes]:
    """Decompresses all frames, one after another.

    The library's stream reader ends silently inside a truncated frame and its one-shot call reads only the first frame.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, step = None, CHUNK >> 4
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        at = 0
        while at < len(chunk):
            frame = frame or decompressor.decompressobj()
            piece = chunk[at : at + step]
            try:
                out = frame.decompress(piece)
            except zstandard.ZstdError as e:
                byte = file.tell() - len(chunk) + at
                raise ValueError(f"input {name}: damaged zstd data near byte {byte} ({e}); fetch the file again") from e
            if out:
                yield out
            # A step of a few bytes may give a gigabyte, and cannot be told to give less: smaller ones where it swells.
            if len(out) > OUT:
                step = max(step // 8, 16)
            elif len(out) < OUT // 4:
                step = min(2 * step, CHUNK)
            at += len(piece)
            if frame.eof:
                at, frame = at - len(frame.unused_data), None
    if frame is not None:
        raise ValueError(
            f"input {name}: truncated, it ends at byte {file.tell()} inside a zstd frame; fetch the file again"
        )


def _gzip_chunks(name: str, file: BinaryIO, digest) -> Iterator[bytes]:
    """Decompresses all members, one after another; zero bytes after a member are padding, anything else is an error."""
    import zlib

    member = None
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        at = file.tell() - len(chunk)
        while chunk:
            if member is None:
                chunk = chunk.lstrip(b"\0") if at else chunk
                if not chunk:
                    break
                member = zlib.decompressobj(wbits=31)
            try:
                out = member.decompress(chunk)
            except zlib.error as e:
                raise ValueError(f"input {name}: damaged gzip data near byte {at} ({e}); fetch the file again") from e
            if out:
                yield out
            if not member.eof:
                break
            chunk, member = member.unused_data, None
            at = at or 1  # past the first member
    if member is not None:
        raise ValueError(
            f"input {name}: truncated, it ends at byte {file.tell()} inside a gzip member; fetch the file again"
        )
