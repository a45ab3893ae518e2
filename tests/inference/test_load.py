import pytest
import torch

from lit_msar.inference.load import read_checkpoint, run_tokenizer
from lit_msar.model.spec import ModelSpec


class Evil:
    """Would write a file if a checkpoint could run code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing\.ckpt"):
        read_checkpoint(tmp_path / "nothing.ckpt")


def test_a_checkpoint_runs_no_code(tmp_path):
    torch.save({"lit_msar": Evil(str(tmp_path / "written"))}, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match=r"evil\.ckpt is not a readable checkpoint"):
        read_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "written").exists()


def test_truncated_file_is_named(tmp_path):
    torch.save({"lit_msar": {"a": torch.zeros(1000)}}, tmp_path / "cut.ckpt")
    blob = (tmp_path / "cut.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(ValueError, match=r"cut\.ckpt is not a readable checkpoint"):
        read_checkpoint(tmp_path / "cut.ckpt")


def test_foreign_checkpoint_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match=r"foreign\.ckpt was not written by this kit"):
        read_checkpoint(tmp_path / "foreign.ckpt")


def test_unknown_strategy_is_named():
    with pytest.raises(ValueError, match="needs the residual strategy Exotic"):
        ModelSpec({}, "Exotic", {}).make()


def test_missing_tokenizer_is_named(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        run_tokenizer(path)
    path.parent.mkdir()
    path.touch()
    with pytest.raises(FileNotFoundError, match=r"name one with --tokenizer"):
        run_tokenizer(path)
