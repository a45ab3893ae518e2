"""The table of a prepared directory shows its sets, lengths and a sample."""

import os
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


FAULTS = {
    "missing": os.unlink,
    "empty": lambda file: os.truncate(file, 0),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "too long": lambda file: os.truncate(file, file.stat().st_size + 8),
}


@pytest.mark.parametrize("options", [{}, {"sample_tokens": 0, "histogram": False}], ids=["whole", "short"])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize(("kind", "damage"), FAULTS.items(), ids=FAULTS)
def test_info_names_a_shard_of_the_wrong_size_before_it_shows_anything(
    prepared: Path, kind: str, damage: Callable, suffix: str, options: dict, capsys: pytest.CaptureFixture
) -> None:
    capsys.readouterr()  # what prepare said
    damage(prepared / f"train/code/shard-00000{suffix}")  # the sample is of the other set
    with pytest.raises((FileNotFoundError, ValueError), match=rf"train/code/shard-00000{suffix}: {kind}"):
        data_info(str(prepared), **options)
    assert capsys.readouterr().out == ""


def test_info_reads_the_content_where_asked(prepared: Path) -> None:
    file = prepared / "train/code/shard-00000.bin"
    file.write_bytes(bytes(file.stat().st_size))
    data_info(str(prepared))
    with pytest.raises(ValueError, match=r"code/shard-00000.bin: damaged"):
        data_info(str(prepared), verify=True)


def test_info_says_that_no_training_document_is_left(
    tmp_path: Path, write_jsonl: Callable, model_file: Path, capsys: pytest.CaptureFixture
) -> None:
    blank, one = write_jsonl("blank.jsonl", [("A", "")]), write_jsonl("one.jsonl", [("A", "alpha beta")])
    prepare(str(tmp_path / "out"), input=str(blank), val_input=str(one), tokenizer=str(model_file), workers=1)
    data_info(str(tmp_path / "out"))
    assert "no document for training" in capsys.readouterr().out
