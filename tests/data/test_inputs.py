"""Files become the same blocks whatever their compression, and a damaged file is an error with its byte."""

import gzip
import io
import random
from pathlib import Path

import pytest
import zstandard

from data import inputs
from data.inputs import FileInput, cut_blocks, find_inputs

LINES = [("x" * random.Random(i).randrange(200) + f" {i}\n").encode() for i in range(3000)]
CONTENT = b"".join(LINES)


def compress(kind: str, content: bytes) -> bytes:
    """The content in `kind`; the -frames kinds hold it in several frames or members, one of them empty."""
    parts = [content[:1000], b"", content[1000:90_000], content[90_000:]] if kind.endswith("frames") else [content]
    if kind.startswith("zst"):
        return b"".join(zstandard.ZstdCompressor().compress(p) for p in parts)
    if kind.startswith("gz"):
        return b"".join(gzip.compress(p, mtime=0) for p in parts)
    return content


KINDS = {
    "plain": ".jsonl",
    "zst": ".jsonl.zst",
    "zst-frames": ".jsonl.zst",
    "gz": ".jsonl.gz",
    "gz-frames": ".jsonl.gz",
}


@pytest.fixture(params=KINDS)
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / f"f{KINDS[request.param]}"
    file.write_bytes(compress(request.param, CONTENT))
    return file


def test_blocks_are_whole_lines_and_the_same_for_all_kinds(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK", 5000)
    source = FileInput(str(packed))
    blocks = list(source.blocks())
    assert b"".join(b.data for b in blocks) == CONTENT
    assert len(blocks) > 50
    line = 1
    for block in blocks:
        assert block.line == line
        assert block.data.endswith(b"\n")
        assert len(block.data) <= 5000
        line += block.data.count(b"\n")
    plain = [b.data for b in cut_blocks("", iter([CONTENT]), lambda: 0, 5000)]
    assert [b.data for b in blocks] == plain
    assert blocks[-1].position == source.size
    assert source.sha256() == inputs.hash_file(packed)


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_every_truncation_of_a_compressed_file_is_found(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"f{KINDS[kind]}"
    whole = compress(kind, CONTENT[:20_000])
    for length in range(1, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"f.jsonl.*: truncated, it ends at byte {length} inside"):
            list(FileInput(str(file)).blocks())


@pytest.mark.parametrize("kind", ["zst", "gz"])
@pytest.mark.parametrize("where", ["middle", "after"])
def test_damage_is_found_and_named(tmp_path: Path, kind: str, where: str) -> None:
    whole = compress(kind, CONTENT)
    middle = len(whole) // 2
    damaged = whole[:middle] + b"\xff" * 40 + whole[middle + 40 :] if where == "middle" else whole + b"garbage-bytes"
    file = tmp_path / f"f{KINDS[kind]}"
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"damaged .* data near byte"):
        list(FileInput(str(file)).blocks())


def test_zstd_skippable_frames_are_skipped(tmp_path: Path) -> None:
    skippable = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    file = tmp_path / "f.jsonl.zst"
    file.write_bytes(skippable + compress("zst", CONTENT) + skippable)
    assert b"".join(b.data for b in FileInput(str(file)).blocks()) == CONTENT


@pytest.mark.parametrize("chunk", [1, 7, 4096], ids=lambda n: f"chunks-of-{n}")
def test_cutting_does_not_depend_on_chunks_and_takes_long_lines(chunk: int) -> None:
    text = b"short\n" + b"y" * 300 + b"\nz\n" + b"w" * 99 + b"\n" * 30 + b"no end"
    whole = [(b.data, b.line) for b in cut_blocks("", iter([text]), lambda: 0, 50)]
    stream = io.BytesIO(text)
    pieces = [(b.data, b.line) for b in cut_blocks("", iter(lambda: stream.read(chunk), b""), lambda: 0, 50)]
    assert pieces == whole
    assert b"".join(d for d, _ in whole) == text
    assert [line for _, line in whole] == [1 + text[: text.index(d)].count(b"\n") for d, _ in whole]


def test_byte_order_mark_is_dropped() -> None:
    assert [b.data for b in cut_blocks("", iter([b"\xef\xbb\xbf{}\n"]), lambda: 0, 50)] == [b"{}\n"]


def test_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE", 1000)
    chunks = iter([b"ok\n", *[b"x" * 100] * 50])
    with pytest.raises(ValueError, match="input f: line 2 is longer than 1000 bytes"):
        list(cut_blocks("f", chunks, lambda: 0, 200))


def test_find_inputs_takes_paths_globs_and_directories(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.zst", "c.txt", "notes.md"):
        (tmp_path / name).write_text("x")
    names = [Path(f.name).name for f in find_inputs(str(tmp_path), "--input")]
    assert names == ["a.jsonl.zst", "b.jsonl", "c.txt"]
    names = [Path(f.name).name for f in find_inputs([f"{tmp_path}/*.txt", f"{tmp_path}/b.jsonl"], "--input")]
    assert names == ["c.txt", "b.jsonl"]


def test_wrong_inputs_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "b.jsonl").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"--input .*gone\*: no such file, and no file matches"):
        find_inputs(f"{tmp_path}/gone*", "--input")
    with pytest.raises(ValueError, match=r"--input .*a.md: unknown kind of file"):
        find_inputs(f"{tmp_path}/a.md", "--input")
    with pytest.raises(ValueError, match=r"empty.jsonl: empty file \(0 bytes\)"):
        find_inputs(f"{tmp_path}/empty.jsonl", "--input")
    with pytest.raises(ValueError, match=r"b.jsonl: named twice"):
        find_inputs([f"{tmp_path}/b.jsonl", f"{tmp_path}/b*"], "--input")
