"""The embedded corpus is Python sources as documents, chosen the same way each time, within its size."""

import json
from pathlib import Path

import pytest

from data import python_source
from data.prepare import prepare
from data.python_source import PythonInput, python_inputs
from data.shards import load_manifest


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for i in range(30):
        file = tmp_path / f"pkg{i % 3}/m{i}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# module {i}\n" + "x = 1\n" * 100)
    (tmp_path / "pkg0/latin.py").write_bytes(b"# \xe9\n" * 100)
    (tmp_path / "pkg0/tiny.py").write_text("x")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/m.py").write_text("x = 1\n" * 100)
    return tmp_path


def test_documents_are_files_within_the_cap(sources: Path) -> None:
    source = PythonInput("Python", sources, 8000)
    documents = [json.loads(line) for block in source.blocks() for line in block.data.splitlines()]
    assert 10 <= len(documents) <= 13
    assert source.size <= 8000
    assert {d["meta"]["pile_set_name"] for d in documents} == {"Python"}
    for d in documents:
        assert d["text"] == (sources / d["meta"]["path"]).read_text()
    again = PythonInput("Python", sources, 8000)
    assert again.identity() == source.identity()
    assert [b.data for b in again.blocks()] == [b.data for b in source.blocks()]
    assert again.sha256() == source.sha256()


def test_other_encodings_and_tests_are_left_out(sources: Path) -> None:
    source = PythonInput("Python", sources, 1 << 20)
    documents = [json.loads(line) for block in source.blocks() for line in block.data.splitlines()]
    assert len(documents) == 30


def test_prepare_makes_both_sets_with_a_default_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_source, "CAPS", {"Python standard library": 400_000, "Python packages": 400_000})
    prepare(str(tmp_path / "out"), source="python", train_tokenizer=600, split="val=0.2", workers=1, verify=True)
    with pytest.raises(ValueError, match="other tokenizer"):
        prepare(str(tmp_path / "out"), source="python", train_tokenizer=700, split="val=0.2")
    # another package on the machine does not make it wrong
    monkeypatch.setattr(python_source, "CAPS", {"Python standard library": 300_000, "Python packages": 400_000})
    prepare(str(tmp_path / "out"), source="python", train_tokenizer=600, split="val=0.2")
    manifest = load_manifest(tmp_path / "out")
    assert [s.name for s in manifest.splits["train"]] == ["Python packages", "Python standard library"]
    assert manifest.splits["val"]


def test_machine_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_source.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="source python: no Python files below"):
        python_inputs()
