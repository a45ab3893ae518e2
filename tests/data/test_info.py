"""The table of a prepared directory shows its sets, lengths and a sample."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data.info import data_info
from data.prepare import prepare


@pytest.fixture
def prepared(tmp_path: Path, write_jsonl: Callable, model_file: Path) -> Path:
    file = write_jsonl("a.jsonl", [("Wiki (en)", "alpha beta [bold] gamma")] * 5 + [("Code", "x = 1\n")])
    prepare(str(tmp_path / "out"), input=str(file), tokenizer=str(model_file), split="val=0", workers=1)
    return tmp_path / "out"


def test_info_shows_sets_histogram_and_sample(prepared: Path, capsys: pytest.CaptureFixture) -> None:
    data_info(str(prepared))
    out = capsys.readouterr().out
    assert "330 ids, uint16" in out
    (wiki,) = [line for line in out.splitlines() if "Wiki (en)" in line]
    assert wiki.split()[3] == "5"
    assert "document length of train" in out
    assert "█" in out
    assert "alpha beta [bold] gamma" in out
    assert "2 shards from 1 inputs, 0 empty documents dropped" in out


def test_info_can_be_short(prepared: Path, capsys: pytest.CaptureFixture) -> None:
    data_info(str(prepared), sample_tokens=0, histogram=False)
    out = capsys.readouterr().out
    assert "█" not in out
    assert "alpha" not in out


def test_info_names_what_is_wrong(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone: does not exist"):
        data_info(str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json; make it with"):
        data_info(str(tmp_path))
    with pytest.raises(ValueError, match="sample_tokens"):
        data_info(str(prepared), sample_tokens=-1)
    (prepared / "train/code/shard-00000.bin").write_bytes(b"xx")
    with pytest.raises(ValueError, match=r"code/shard-00000.bin: truncated"):
        data_info(str(prepared), verify=True)
