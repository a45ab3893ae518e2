import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from training.conftest import data_of, module_of, prepared, trainer_of  # noqa: F401 (a fixture)

from lit_msar.inference import load
from lit_msar.inference.consolidate import consolidate
from lit_msar.inference.load import load_decoder, run_tokenizer
from lit_msar.residual import Vanilla
from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.result import RunFiles

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory, prepared):  # noqa: F811
    """A run of two steps: its checkpoint and its trained module."""
    root, module = tmp_path_factory.mktemp("run"), module_of()
    trainer_of(root, 2, [Checkpoint(), RunFiles()], enable_checkpointing=True).fit(module, data_of(prepared))
    return root / "checkpoints" / "last.ckpt", module


def logits(decoder):
    return decoder(torch.arange(20).unsqueeze(0)).logits


@pytest.mark.parametrize("name", ["one.safetensors", "several"])
def test_consolidated_weights_give_the_same_logits(run, tmp_path, name):
    checkpoint, _ = run
    consolidate(str(checkpoint), str(tmp_path / name), max_file_gb=3e-5)
    assert torch.equal(logits(load_decoder(tmp_path / name, CPU)), logits(load_decoder(checkpoint, CPU)))
    assert run_tokenizer(tmp_path / name) == (tmp_path / name if name == "several" else tmp_path) / "tokenizer.model"


def test_files_are_safetensors_of_bounded_size_with_an_index(run, tmp_path):
    checkpoint, module = run
    consolidate(str(checkpoint), str(tmp_path / "out"), max_file_gb=3e-5)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    held = {}
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
        assert all(index["weight_map"][name] == file.name for name in tensors)
        held |= tensors
    state = module.decoder.state_dict()
    assert held.keys() == state.keys()
    assert all(torch.equal(held[name], value) for name, value in state.items())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in held.values())


def test_bfloat16_halves_all_but_the_balance_bias(run, tmp_path):
    checkpoint, module = run
    consolidate(str(checkpoint), str(tmp_path / "half.safetensors"), dtype="bfloat16")
    held = load_file(tmp_path / "half.safetensors")
    for name, value in module.decoder.state_dict().items():
        assert torch.equal(held[name], value if "balance_bias" in name else value.bfloat16()), name


def test_a_run_starts_from_consolidated_weights(run, tmp_path, prepared):  # noqa: F811
    checkpoint, module = run
    consolidate(str(checkpoint), str(tmp_path / "w.safetensors"))
    for path in (checkpoint, tmp_path / "w.safetensors"):
        again = module_of(init_from=str(path))
        again.configure_model()
        state = module.decoder.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in again.decoder.state_dict().items())


def test_start_from_another_model_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"model.init_from=.* another model .*MSAR in the checkpoint, Vanilla"):
        module_of(Vanilla(), init_from=str(run[0])).configure_model()


def test_existing_output_is_not_overwritten(run, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there exists already"):
        consolidate(str(run[0]), str(tmp_path / "there"))


def test_interrupted_consolidation_leaves_no_output(run, tmp_path, monkeypatch):
    fill, filled = load.FileWeights.fill, []

    def fail_at_the_third(self, tensors):
        if len(filled) == 2:
            raise OSError("no space left")
        filled.append(fill(self, tensors))

    monkeypatch.setattr(load.FileWeights, "fill", fail_at_the_third)
    with pytest.raises(OSError, match="no space left"):
        consolidate(str(run[0]), str(tmp_path / "w.safetensors"))
    assert not (tmp_path / "w.safetensors").exists()


def test_truncated_or_foreign_safetensors_are_refused(run, tmp_path):
    consolidate(str(run[0]), str(tmp_path / "w.safetensors"))
    blob = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(ValueError, match=r"cut.safetensors is not a readable safetensors file"):
        load_decoder(tmp_path / "cut.safetensors", CPU)
    (tmp_path / "foreign.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with safe_open(tmp_path / "foreign.safetensors", framework="pt") as opened:
        assert not opened.keys()
    with pytest.raises(ValueError, match=r"foreign.safetensors was not written by this kit"):
        load_decoder(tmp_path / "foreign.safetensors", CPU)
