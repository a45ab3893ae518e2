"""The datamodule under a real Trainer: every sample once, and the same order after any resume."""

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import fsspec
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from data.shards import Manifest, ShardWriter, hash_file, load_manifest
from data.verify import RECORD
from lit_msar.training.datamodule import TokenData

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),  # a resumed run goes on in its directory
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
SEQ_LEN = 4
SIZES = {"books": 23, "code": 14}  # samples of each training set; 37 in all, which no batch divides


def write_set(root: Path, split: str, name: str, n_samples: int, first: int, doc_len: int = 0) -> object:
    """A set whose tokens are first, first + 1, ...: a sample's first token says which it is. Id 9999 ends documents."""
    tokens = np.arange(first, first + n_samples * SEQ_LEN + 1, dtype=np.uint16)
    if doc_len:
        tokens[doc_len - 1 :: doc_len] = 9999
    lengths = np.diff([0, *range(doc_len, len(tokens), doc_len), len(tokens)]) if doc_len else np.array([len(tokens)])
    writer = ShardWriter(root, name, f"{split}/{name}", "uint16", 1 << 20)
    writer.append(tokens, lengths, lengths * 3)
    return writer.finish()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"))


def write_prepared(root: Path, doc_len: int = 0) -> Path:
    first = itertools.count(0, 1000)
    splits = {
        "train": [write_set(root, "train", name, n, next(first), doc_len) for name, n in SIZES.items()],
        "val": [write_set(root, "val", name, n, next(first), doc_len) for name, n in {"books": 5, "poems": 6}.items()],
    }
    tokenizer = {"file": "tokenizer.model", "kind": "sentencepiece", "sha256": "", "vocab_size": 10000, "eod_id": 9999}
    (root / "manifest.json").write_text(Manifest("uint16", tokenizer, splits).to_json())
    return root


def sample_ids(batch: dict) -> list[int]:
    return batch["tokens"][:, 0].tolist()


class Toy(pl.LightningModule):
    """Remembers the samples of each optimizer step."""

    def __init__(self, touch_estimate: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.touch_estimate = touch_estimate
        self.seen: list[int] = []
        self.evaluated: list[int] = []

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        self.seen += sample_ids(batch)
        return self.weight * batch["tokens"].float().mean()

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.evaluated += sample_ids(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.touch_estimate:
            _ = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    prepared: Path,
    folder: Path,
    max_steps: int,
    ckpt: Path | None = None,
    accumulate: int = 1,
    touch_estimate: bool = False,
    callbacks: tuple = (),
    max_epochs: int = -1,
    data: dict | None = None,
    **trainer: object,
) -> tuple[list[int], Path, TokenData]:
    """Trains to `max_steps`; samples trained on, the checkpoint at the end, and the datamodule."""
    datamodule = TokenData(str(prepared), seq_len=SEQ_LEN, **({"workers": 0, "batch_size": 4} | (data or {})))
    module = Toy(touch_estimate)
    checkpoint = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    runner = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate,
        callbacks=[checkpoint, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"limit_val_batches": 0} | trainer),
    )
    runner.fit(module, datamodule=datamodule, ckpt_path=ckpt)
    return module.seen, folder / "last.ckpt", datamodule


@pytest.fixture(scope="module")
def uninterrupted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """480 samples in order: 12 epochs and a bit."""
    seen, _, _ = fit(prepared, tmp_path_factory.mktemp("straight"), 120)
    assert len(seen) == 480
    return seen


def test_epochs_hold_every_sample_once_in_new_orders(uninterrupted: list[int]) -> None:
    epochs = [uninterrupted[i : i + 37] for i in range(0, 370, 37)]
    assert all(len(set(e)) == 37 for e in epochs)
    assert len({tuple(e) for e in epochs}) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_two_resumes_continue_the_order(prepared: Path, tmp_path: Path, uninterrupted: list[int], workers: int) -> None:
    seen: list[int] = []
    ckpt = None
    # within the first epoch, and past the second one's end (10 steps are an epoch of Lightning's)
    for until in (7, 10, 26):
        part, ckpt, data = fit(prepared, tmp_path, until, ckpt, data={"workers": workers})
        seen += part
        assert data.position == 4 * until
    assert seen == uninterrupted[: len(seen)]
    assert len(seen) == 4 * 26


@pytest.mark.parametrize(
    ("sizes", "accumulations"),
    [((4, 8, 2), (1, 1, 1)), ((4, 2, 8), (2, 4, 1)), ((4, 4, 4), (1, 3, 2)), ((3, 5, 7), (2, 1, 3))],
    ids=["micro-batch", "same-step", "accumulation", "all"],
)
def test_resume_with_other_batches_continues_the_order(
    prepared: Path, tmp_path: Path, uninterrupted: list[int], sizes: tuple, accumulations: tuple
) -> None:
    seen: list[int] = []
    ckpt, steps, per_step = None, 0, []
    for size, accumulate in zip(sizes, accumulations, strict=True):
        steps += 11
        part, ckpt, data = fit(prepared, tmp_path, steps, ckpt, accumulate, data={"batch_size": size})
        seen += part
        per_step.append(len(part) / 11)
        assert data.position == len(seen)
    assert seen == uninterrupted[: len(seen)]
    # no step is smaller than the others, at an epoch's end or after a resume
    assert per_step == [size * accumulate for size, accumulate in zip(sizes, accumulations, strict=True)]


def test_resume_survives_estimated_stepping_batches(prepared: Path, tmp_path: Path, uninterrupted: list[int]) -> None:
    first, ckpt, _ = fit(prepared, tmp_path, 5, touch_estimate=True, max_epochs=50)
    second, _, _ = fit(prepared, tmp_path, 14, ckpt, touch_estimate=True, max_epochs=50)
    assert first + second == uninterrupted[:56]


def test_save_within_an_accumulation_window_repeats_its_lost_batches(
    prepared: Path, tmp_path: Path, uninterrupted: list[int]
) -> None:
    class SaveAt(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == 7:  # step 2 took 3 micro-steps, step 3 has 1 of its 3
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    fit(prepared, tmp_path, 4, accumulate=3, callbacks=(SaveAt(),))
    seen, _, data = fit(prepared, tmp_path, 5, tmp_path / "middle.ckpt", accumulate=3)
    assert seen == uninterrupted[2 * 12 : 5 * 12]
    assert data.position == 60


def test_max_epochs_takes_every_sample_in_whole_steps(prepared: Path, tmp_path: Path) -> None:
    seen, _, data = fit(prepared, tmp_path, -1, accumulate=3, max_epochs=1)
    assert len(seen) == 48  # 37 samples in steps of 12
    assert len(set(seen)) == 37
    assert data.position == 48


@pytest.mark.parametrize("save_at", [9, 10], ids=["last-but-one-step", "last-step"])
def test_resume_around_an_epochs_end_keeps_max_epochs(
    prepared: Path, tmp_path: Path, uninterrupted: list[int], save_at: int
) -> None:
    first, ckpt, _ = fit(prepared, tmp_path, save_at, max_epochs=2)
    second, _, _ = fit(prepared, tmp_path, -1, ckpt, max_epochs=2)
    assert first + second == uninterrupted[:80]


def test_checkpoint_at_validation_resumes_exactly(prepared: Path, tmp_path: Path, uninterrupted: list[int]) -> None:
    class SaveAfterValidation(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    options = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    options |= {"num_sanity_val_steps": 0, "callbacks": (SaveAfterValidation(),)}
    fit(prepared, tmp_path, 12, **options)
    for step in (3, 9, 12):
        seen, _, _ = fit(prepared, tmp_path, 17, tmp_path / f"{step}.ckpt", **options)
        assert seen == uninterrupted[4 * step : 68]


def test_overfit_batches_repeats_the_first_batches(prepared: Path, tmp_path: Path, uninterrupted: list[int]) -> None:
    seen, _, _ = fit(prepared, tmp_path, 6, overfit_batches=2)
    assert seen == uninterrupted[:8] * 3


def test_second_fit_of_one_trainer_counts_its_own_data(prepared: Path, tmp_path: Path) -> None:
    runner = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    first = TokenData(str(prepared), seq_len=SEQ_LEN, batch_size=4, workers=0)
    second = TokenData(str(prepared), seq_len=SEQ_LEN, batch_size=5, workers=0, resume="fresh")
    runner.fit(Toy(), datamodule=first)
    runner.fit_loop.epoch_loop.max_steps = 7
    runner.fit(Toy(), datamodule=second)
    assert first.position == 12
    assert second.position == 5 * (runner.global_step - 3)
    assert second.position > 0


def test_checkpoint_of_other_data_is_refused_by_name(prepared: Path, tmp_path: Path) -> None:
    _, ckpt, _ = fit(prepared, tmp_path, 3)
    with pytest.raises(ValueError, match=r"seed 1 \(checkpoint: 0\).*--data.resume fresh"):
        fit(prepared, tmp_path, 5, ckpt, data={"seed": 1})
    seen, ckpt, _ = fit(prepared, tmp_path, 5, ckpt, data={"seed": 1, "resume": "fresh"})
    straight, _, _ = fit(prepared, tmp_path / "other", 5, data={"seed": 1})
    assert seen == straight[:8]
    again, _, _ = fit(prepared, tmp_path, 7, ckpt, data={"seed": 1, "resume": "fresh"})
    assert again == straight[8:16]


def test_checkpoint_without_position_is_refused(prepared: Path, tmp_path: Path) -> None:
    _, ckpt, _ = fit(prepared, tmp_path, 3)
    state = torch.load(ckpt, weights_only=True)
    del state["TokenData"]
    torch.save(state, ckpt)
    with pytest.raises(ValueError, match="no position in the data"):
        fit(prepared, tmp_path, 5, ckpt)


def as_rank(data: TokenData, rank: int, n_ranks: int, accumulate: int = 1) -> TokenData:
    """Gives a datamodule a place among ranks without starting them."""
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": n_ranks})
    data.trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=accumulate, overfit_batches=0)
    return data


def rank_batches(prepared: Path, n_ranks: int, batch_size: int, position: int, n_batches: int, **data: object) -> list:
    """Micro-batches of all ranks from a position on: [n_batches][n_ranks] lists of sample ids."""
    streams = []
    for rank in range(n_ranks):
        module = TokenData(str(prepared), seq_len=SEQ_LEN, batch_size=batch_size, workers=0, **data)
        module.position = position
        streams.append(iter(as_rank(module, rank, n_ranks).train_dataloader()))
    return [[sample_ids(next(s)) for s in streams] for _ in range(n_batches)]


@pytest.mark.parametrize(("n_ranks", "batch_size"), [(1, 5), (2, 4), (3, 1), (4, 3)])
def test_ranks_share_the_global_order(prepared: Path, uninterrupted: list[int], n_ranks: int, batch_size: int) -> None:
    batches = rank_batches(prepared, n_ranks, batch_size, position=30, n_batches=8)
    flat = [i for step in batches for rank in step for i in rank]
    assert flat == uninterrupted[30 : 30 + 8 * n_ranks * batch_size]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    phases=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 2**40),
)
def test_any_ranks_batches_and_resumes_give_the_same_order(prepared: Path, phases: list, seed: int) -> None:
    """Phases of (ranks, micro-batch, micro-steps), each resumed where the last one stopped."""
    seen: list[int] = []
    for n_ranks, batch_size, n_batches in phases:
        batches = rank_batches(prepared, n_ranks, batch_size, len(seen), n_batches, seed=seed)
        seen += [i for step in batches for rank in step for i in rank]
    (straight,) = zip(*rank_batches(prepared, 1, 1, 0, len(seen), seed=seed), strict=True)
    assert seen == [ids[0] for ids in straight]
    for at in range(0, len(seen) - 36, 37):
        assert len(set(seen[at : at + 37])) == 37


def test_tensor_parallel_ranks_read_what_their_mesh_says(prepared: Path) -> None:
    data = as_rank(TokenData(str(prepared), seq_len=SEQ_LEN, batch_size=4, workers=0), rank=1, n_ranks=2, accumulate=3)
    assert data.shard() == (1, 2)
    assert data.step_samples == 24
    assert len(data.train_dataloader()) == 6  # 37 samples are two steps of 24
    assert data.describe_next_step() == "0 to 23"


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_validation_gives_every_sample_once_and_equal_batches(prepared: Path, n_ranks: int) -> None:
    seen, lengths = [], []
    for rank in range(n_ranks):
        data = as_rank(TokenData(str(prepared), seq_len=SEQ_LEN, batch_size=3, workers=0), rank, n_ranks)
        batches = list(data.val_dataloader()[0])
        lengths.append(len(batches))
        for batch in batches:
            real = (batch["targets"] != -100).any(1)
            seen += batch["tokens"][real, 0].tolist()
            names = [data.set_names[i] for i in batch["set_id"][real]]
            assert names == ["books" if t < 3000 else "poems" for t in batch["tokens"][real, 0]]
    assert len(set(lengths)) == 1
    assert sorted(seen) == [*range(2000, 2020, 4), *range(3000, 3024, 4)]


def test_validation_limit_is_per_set_and_evenly_spaced(prepared: Path) -> None:
    data = TokenData(str(prepared), seq_len=SEQ_LEN, batch_size=8, workers=0, val_samples=2)
    (batch,) = list(data.val_dataloader()[0])
    real = (batch["targets"] != -100).any(1)
    assert sorted(batch["tokens"][real, 0].tolist()) == [2000, 2008, 3000, 3012]


def test_targets_are_the_next_tokens_and_shards_end_masked(prepared: Path) -> None:
    data = TokenData(str(prepared), seq_len=3, batch_size=50, workers=0)
    batch = next(iter(data.train_dataloader()))
    masked = batch["targets"] == -100
    assert torch.equal(batch["targets"][~masked], batch["tokens"][~masked] + 1)
    assert masked.sum() == 2  # 93 and 57 tokens are 31 and 19 samples, and each last one has 2 targets of 3


def test_position_restarts_at_documents(tmp_path: Path) -> None:
    write_prepared(tmp_path, doc_len=3)
    data = TokenData(str(tmp_path), seq_len=SEQ_LEN, batch_size=37, workers=0, reset_at_document=True)
    batch = next(iter(data.train_dataloader()))
    for tokens, position in zip(batch["tokens"].tolist(), batch["position"].tolist(), strict=True):
        expected, at = [], 0
        for token in tokens:
            expected.append(at)
            at = 0 if token == 9999 else at + 1
        assert position == expected
    assert "position" not in next(iter(TokenData(str(tmp_path), seq_len=4, workers=0).train_dataloader()))


def test_mixture_leaves_sets_out_and_keeps_weights(prepared: Path) -> None:
    only = rank_batches(prepared, 1, 8, 0, 10, weights={"code": 2.0})
    assert min(i for step in only for rank in step for i in rank) >= 1000
    mixed = rank_batches(prepared, 2, 10, 0, 50, weights={"code": 3, "books": 1})
    share = np.mean([i >= 1000 for step in mixed for rank in step for i in rank])
    assert abs(share - 0.75) < 0.005


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "data.batch_size must be at least 1, got 0"),
        ({"workers": -1}, "data.workers must be at least 0"),
        ({"seq_len": 5000}, "seq_len=5000 is longer than the data"),
        ({"weights": {"verse": 1.0}}, "no training set 'verse'"),
        ({"weights": {"code": -1.0}}, "must be finite, not negative"),
        ({"weights": {"code": 0.0}}, "not all zero"),
        ({"weights": {"code": 1.0, "books": 1e-9}}, "'books' has less than one in a million"),
        ({"packing": "tight"}, "packing must be chunk or document"),
    ],
    ids=lambda x: "-".join(f"{k}" for k in x) if isinstance(x, dict) else None,
)
def test_wrong_options_are_named(prepared: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenData(str(prepared), **({"seq_len": SEQ_LEN} | options)).setup("fit")


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: does not exist"):
        TokenData(str(tmp_path / "nowhere")).setup("fit")


def test_damaged_and_truncated_shards_stop_before_training(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    shard = tmp_path / "train/code/shard-00000.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:40] + b"\xff" + good[41:])
    with pytest.raises(ValueError, match=r"train/code/shard-00000.bin: damaged"):
        TokenData(str(tmp_path), seq_len=SEQ_LEN).prepare_data()
    shard.write_bytes(good[:-3])
    with pytest.raises(ValueError, match=rf"shard-00000.bin: truncated, it ends at byte {len(good) - 3}"):
        TokenData(str(tmp_path), seq_len=SEQ_LEN, verify="size").setup("fit")
    shard.write_bytes(good)
    TokenData(str(tmp_path), seq_len=SEQ_LEN).prepare_data()
    assert (tmp_path / RECORD).is_file()


def test_sets_that_are_left_out_are_not_needed(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    shutil.rmtree(tmp_path / "train/books")
    data = TokenData(str(tmp_path), seq_len=SEQ_LEN, weights={"code": 1.0}, packing="document", workers=0)
    data.prepare_data()
    data.setup("fit")
    assert set(next(iter(data.train_dataloader()))["set_id"].tolist()) == {1}
    assert data.set_names == ["books", "code", "poems"]
    with pytest.raises(FileNotFoundError, match=r"train/books/shard-00000.bin: missing"):
        TokenData(str(tmp_path), seq_len=SEQ_LEN).setup("fit")


def test_remote_data_trains_like_local_data(tmp_path: Path, uninterrupted: list[int]) -> None:
    write_prepared(tmp_path / "local")
    (tmp_path / "local/tokenizer.model").touch()
    manifest = load_manifest(tmp_path / "local")
    manifest.tokenizer["sha256"] = hash_file(tmp_path / "local/tokenizer.model")
    (tmp_path / "local/manifest.json").write_text(manifest.to_json())
    fs = fsspec.filesystem("memory")
    fs.put(str(tmp_path / "local"), "/trained/data", recursive=True)
    options = {"cache_dir": str(tmp_path / "cache")}
    seen, _, _ = fit("memory://trained/data", tmp_path / "run", 5, data=options)
    assert seen == uninterrupted[:20]


def test_bytes_per_token_is_in_the_order_of_set_names(prepared: Path) -> None:
    data = TokenData(str(prepared))
    assert data.set_names == ["books", "code", "poems"]
    assert data.bytes_per_token("train").tolist() == [3.0, 3.0, 0.0]
    assert data.bytes_per_token("val").tolist() == [3.0, 0.0, 3.0]
