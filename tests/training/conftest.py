"""A small prepared directory with a real tokenizer, and runs over it."""

import json
import random
from pathlib import Path

import lightning as L
import pytest
import torch
from conftest import small_config

from data.prepare import prepare
from lit_msar.initialization import local_part
from lit_msar.model import DecoderConfig
from lit_msar.residual import MSAR, Residual
from lit_msar.training.datamodule import TokenData
from lit_msar.training.module import LanguageModel
from lit_msar.training.optim import OptimizerConfig

WORDS = "the quick brown fox jumps over a lazy dog while 42 green apples fall\n".split(" ")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of random words, 320 ids, with a validation split."""
    root = tmp_path_factory.mktemp("prepared")
    rng = random.Random(0)
    with (root / "text.jsonl").open("w") as file:
        for i in range(200):
            text = " ".join(rng.choices(WORDS, k=60))
            file.write(json.dumps({"text": text, "meta": {"pile_set_name": ("Prose", "Code")[i % 2]}}) + "\n")
    prepare(
        str(root / "out"), input=str(root / "text.jsonl"), train_tokenizer=320, workers=1, split="val=0.2", verify=False
    )
    return root / "out"


def module_of(residual: Residual | None = None, decoder: DecoderConfig | None = None, **options) -> LanguageModel:
    """A small model over the fixture's vocabulary."""
    options.setdefault("optimizer", OptimizerConfig(lr=1e-2, warmup_steps=2))
    return LanguageModel(decoder or small_config(vocab_size=320), residual or MSAR(block_size=2), **options)


def data_of(prepared: Path, **options) -> TokenData:
    """Batches of four sequences of 16 tokens, loaded in the training process."""
    return TokenData(str(prepared), **({"seq_len": 16, "batch_size": 4, "workers": 0} | options))


def trainer_of(root: Path, max_steps: int, callbacks: list[L.Callback] | None = None, **options) -> L.Trainer:
    """A quiet CPU trainer that validates and logs nothing by itself."""
    quiet = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0, "enable_progress_bar": False}
    quiet["accelerator"] = "cpu"
    return L.Trainer(
        max_steps=max_steps,
        max_epochs=-1,
        default_root_dir=root,
        callbacks=callbacks or [],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        gradient_clip_val=options.pop("gradient_clip_val", 1.0),
        **(quiet | options),
    )


class Poison(L.Callback):
    """Makes one weight NaN before a step, counted from 0."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            with torch.no_grad():
                local_part(module.decoder.head.norm.weight)[:1] = float("nan")
