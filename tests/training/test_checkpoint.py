import pytest
import torch
from training.conftest import data_of, module_of, trainer_of

from lit_msar.inference.load import load_decoder, read_checkpoint, run_tokenizer
from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.result import RunFiles


def run(root, prepared, max_steps=5, **options):
    module = module_of()
    callbacks = [Checkpoint(**options), RunFiles()]
    trainer_of(root, max_steps, callbacks, enable_checkpointing=True).fit(module, data_of(prepared))
    return module


def test_newest_checkpoints_stay_and_the_end_is_saved(tmp_path, prepared):
    run(tmp_path, prepared, every_n_steps=2, keep_last=2)
    directory = tmp_path / "checkpoints"
    assert sorted(p.name for p in directory.iterdir()) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert (directory / "last.ckpt").resolve().name == "step=5.ckpt"
    assert read_checkpoint(directory / "last.ckpt")["global_step"] == 5


def test_all_checkpoints_can_stay(tmp_path, prepared):
    run(tmp_path, prepared, every_n_steps=2, keep_last=-1)
    assert len(list((tmp_path / "checkpoints").glob("step=*"))) == 3


def test_every_nth_checkpoint_stays(tmp_path, prepared):
    run(tmp_path, prepared, max_steps=7, every_n_steps=1, keep_last=1, keep_every=3)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["last.ckpt", "step=3.ckpt", "step=6.ckpt", "step=7.ckpt"]


def test_a_run_that_only_measures_writes_none(tmp_path, prepared):
    run(tmp_path, prepared, every_n_steps=1, save=False)
    assert not (tmp_path / "checkpoints").exists()


def test_single_file_says_what_made_it(tmp_path, prepared):
    run(tmp_path, prepared, every_n_steps=2)
    manifest = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["manifest"]
    assert (manifest["step"], manifest["tokens"], manifest["data"]["position"]) == (5, 5 * 4 * 16, 20)
    assert manifest["versions"]["lightning"].startswith("2.6")


@pytest.mark.parametrize(
    "options", [{"every_n_steps": 0}, {"keep_last": 0}, {"keep_every": 0}], ids=lambda o: next(iter(o))
)
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Checkpoint(**options)


def test_a_run_directory_is_enough_to_use_the_model(tmp_path, prepared):
    module = run(tmp_path, prepared)
    path = tmp_path / "checkpoints" / "last.ckpt"
    decoder = load_decoder(path, torch.device("cpu"))
    tokens = torch.randint(320, (1, 9))
    assert torch.equal(decoder(tokens).logits, module.decoder.eval()(tokens).logits)
    assert run_tokenizer(path) == tmp_path / "tokenizer.model"
    assert run_tokenizer(path).read_bytes() == (prepared / "tokenizer.model").read_bytes()
