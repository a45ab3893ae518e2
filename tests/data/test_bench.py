"""The benchmark runs, and its data are what it says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data import bench
from data.shards import check_sizes


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "ROUND_SECONDS", 0.01)


def test_tokenize_compares_with_the_library(
    tmp_path: Path, write_jsonl: Callable, model_file: Path, make_text: Callable, capsys: pytest.CaptureFixture
) -> None:
    file = write_jsonl("a.jsonl", [make_text(i, 100) for i in range(20)])
    bench.main(["tokenize", "--input", str(file), "--tokenizer", str(model_file), "--workers", "1"])
    assert "of the library" in capsys.readouterr().out


def test_load_prints_both_rates(capsys: pytest.CaptureFixture) -> None:
    bench.main(["load", "--tokens", "200000"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["samples", "memmap loop"]


def test_sparse_data_pass_for_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(bench, "SHARD_TOKENS", 1 << 20)
    manifest = bench.fake_data(tmp_path, 5 * (1 << 20) + 5, sparse=True)
    assert len(manifest.shards()) == 6
    check_sizes(tmp_path, manifest)
    assert sum(f.stat().st_blocks for f in tmp_path.rglob("*.bin")) == 0  # no disk
    bench._one_start(str(tmp_path), n_batches=2)
    assert "6 shards" in capsys.readouterr().out


def test_options_are_required(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(["tokenize"])
    assert exit_info.value.code == 2
    assert "--input" in capsys.readouterr().err
