"""LightningDataModule over token shards; its place in the data is one number, the samples of completed steps.

The order of samples is a pure function of (seed, position); ranks, workers, micro-batch and accumulation only say who
reads which. Lightning's own loader state is not used: it is rank 0's alone, counts prefetched batches, and is lost when
`trainer.estimated_stepping_batches` is touched.
"""

import hashlib
import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor

from data.order import Mixture, Shuffle, quotas_of
from data.remote import fetch_manifest, fetch_shards, is_remote
from data.shards import Manifest, check_sizes, load_manifest
from data.split import TokenSplit
from data.tokenizer import Tokenizer, load_tokenizer
from data.verify import verify_once
from lit_msar.training.loader import TrainLoader, ValLoader


class TokenData(pl.LightningDataModule):
    """Batches of tokens from a directory that `prepare` made.

    A batch is a dict of CPU tensors: `tokens` and `targets` [B, T] int64 (targets are -100 where masked), `set_id` [B]
    int64 (index into `set_names`), and with `reset_at_document` also `position` [B, T] int64, each token's position in
    its document, and `boundaries` [n + 1] int32, where documents begin and end in the B T tokens laid end to end.

    Args:
        path: prepared directory, or an fsspec URL of one (s3://, gs://, https://, ...), which is copied into
            `cache_dir` first.
        seq_len: context of a sample (tokens).
        batch_size: samples of a micro-step on each rank (sequences).
        val_batch_size: the same in validation (sequences; default: batch_size).
        seed: of the order of samples.
        workers: loading threads per rank; 0 loads when a batch is asked for (threads).
        weights: mixture, weight by set name, in any unit; sets left out are not trained on. Default: every sample once
            per epoch.
        packing: "chunk" cuts the concatenated documents every seq_len tokens; "document" cuts only documents longer
            than a sample.
        reset_at_document: give `position`, so that attention, positions and convolutions stop at document boundaries.
        val_samples: validation samples of each set, evenly spaced (sequences; default: all).
        verify: "hash" compares every shard that is new or has changed since the last check with the manifest's SHA-256
            before training; "size" compares sizes only.
        cache_dir: where remote data is copied to (default: ~/.cache/lit_msar/data).
        resume: what to do when a checkpoint was trained on another order of data (other shards, seed, seq_len, packing
            or weights): "exact" refuses, "fresh" starts the new data at its first sample.
    Attributes:
        position: samples consumed by completed optimizer steps, over all ranks; saved in checkpoints.
    """

    def __init__(
        self,
        path: str,
        seq_len: int = 2048,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        seed: int = 0,
        workers: int = 2,
        weights: dict[str, float] | None = None,
        packing: Literal["chunk", "document"] = "chunk",
        reset_at_document: bool = False,
        val_samples: int | None = None,
        verify: Literal["hash", "size"] = "hash",
        cache_dir: str | None = None,
        resume: Literal["exact", "fresh"] = "exact",
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("seq_len", seq_len, 1),
            ("batch_size", batch_size, 1),
            ("val_batch_size", val_batch_size, 1),
            ("workers", workers, 0),
            ("val_samples", val_samples, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"data.{name} must be at least {least}, got {value}")
        self.path = path
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.seed = seed
        self.workers = workers
        self.weights = weights
        self.packing = packing
        self.reset_at_document = reset_at_document
        self.val_samples = val_samples
        self.verify = verify
        self.cache_dir = cache_dir
        self.resume = resume
        self.position = 0
        self._pending = 0  # samples of micro-steps whose optimizer step has not come yet
        self._epoch_start = 0  # position where Lightning's current epoch began
        self._has_resumed = False
        self._train_loader: TrainLoader | None = None

    # What the directory holds. Read at first use, so that other parts of a configuration can be linked to it.

    @cached_property
    def root(self) -> Path:
        """The local directory: `path`, or the cached copy of a remote one."""
        return fetch_manifest(self.path, self.cache_dir) if is_remote(self.path) else Path(self.path)

    @cached_property
    def manifest(self) -> Manifest:
        return load_manifest(self.root)

    @property
    def set_names(self) -> list[str]:
        """Names of all sets, train and validation, sorted; `set_id` counts in it."""
        return self.manifest.set_names

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer; the model needs at least as many."""
        return self.manifest.tokenizer["vocab_size"]

    def bytes_per_token(self, split: str) -> Tensor:
        """UTF-8 bytes of text per token (end-of-document ids count) of each set: turns nats into bits per byte.

        Returns:
            [n_sets] float64 in the order of `set_names`; 0 for a set that `split` lacks.
        """
        ratio = {s.name: s.bytes / s.tokens for s in self.manifest.splits.get(split, [])}
        return torch.tensor([ratio.get(name, 0.0) for name in self.set_names], dtype=torch.float64)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data, from the prepared directory."""
        return load_tokenizer(self.root)

    @cached_property
    def used(self) -> Manifest:
        """The manifest without training sets that `weights` leave out: they are neither checked, copied nor read."""
        sets = self.manifest.splits.get("train", [])
        if not sets:
            raise ValueError(f"data {self.path}: holds no training set")
        if self.weights is not None:
            check_weights(self.weights, [s.name for s in sets], self.path)
            sets = [s for s in sets if self.weights.get(s.name)]
        return replace(self.manifest, splits={"train": sets, "val": self.manifest.splits.get("val", [])})

    @cached_property
    def train_split(self) -> TokenSplit:
        return TokenSplit(self.root, self.used, "train", self.seq_len, self.packing, self._index_dir)

    @cached_property
    def val_split(self) -> TokenSplit:
        return TokenSplit(self.root, self.used, "val", self.seq_len, self.packing, self._index_dir)

    @property
    def _index_dir(self) -> Path | None:
        return Path(self.cache_dir).expanduser() if self.cache_dir and not is_remote(self.path) else None

    @cached_property
    def order(self) -> Shuffle | Mixture:
        """Set and sample at each position of the run."""
        sizes = self.train_split.sizes
        if self.weights is None:
            return Shuffle(sizes, self.seed)
        return Mixture(sizes, [float(self.weights[s.name]) for s in self.train_split.sets], self.seed)

    # Lightning's hooks.

    def prepare_data(self) -> None:
        """Checks the shards, and copies remote ones; once per node, before training."""
        if is_remote(self.path):
            fetch_shards(self.path, self.root, self.used, self.used.shards())
        elif self.verify == "hash":
            verify_once(self.root, self.used)
        if self.packing == "document":
            _ = self.train_split, self.val_split  # computes where samples start, once instead of on every rank

    def setup(self, stage: str) -> None:
        check_sizes(self.root, self.used)
        if stage == "fit":
            _ = self.order  # what is wrong with the options shows before the model is built
            if self.trainer is not None:
                # First in the list: checkpoint callbacks save what it counts.
                others = [c for c in self.trainer.callbacks if not isinstance(c, _Position)]
                self.trainer.callbacks[:] = [_Position(self), *others]

    def train_dataloader(self) -> "TrainLoader":
        self._train_loader = TrainLoader(self)
        return self._train_loader

    def val_dataloader(self) -> "list[ValLoader]":
        """One loader over all validation sets in a fixed order; none where the data has no validation split."""
        return [ValLoader(self)] if self.val_split.sizes else []

    def test_dataloader(self) -> "list[ValLoader]":
        """The validation data: prepared directories have no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> "list[ValLoader]":
        """The validation data."""
        return self.val_dataloader()

    def teardown(self, stage: str) -> None:
        if self._train_loader is not None:
            self._train_loader.close()

    def shard(self) -> tuple[int, int]:
        """This rank's number among those that read different data, and how many they are."""
        strategy = getattr(self.trainer, "strategy", None)
        # A tensor-parallel group reads the same data; the strategy knows its mesh.
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
        return kwargs["rank"], kwargs["num_replicas"]

    # The position.

    @property
    def step_samples(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.batch_size * self.shard()[1] * getattr(self.trainer, "accumulate_grad_batches", 1)

    def describe_next_step(self) -> str:
        """The positions that the optimizer step in progress consumes, for messages."""
        return f"{self.position} to {self.position + self.step_samples - 1}"

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch_start": self._epoch_start, "order": self._order_identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at a checkpoint's position; called by Lightning, and ignored outside of `fit`.

        Raises:
            ValueError: the checkpoint was trained on another order of data, and `resume` is "exact".
        """
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return
        self._has_resumed = True
        saved, ours = state_dict["order"], self._order_identity()
        differing = [k for k in ours if saved.get(k) != ours[k]]
        if differing and self.resume == "exact":
            parts = ", ".join(f"{k} {ours[k]} (checkpoint: {saved.get(k)})" for k in differing)
            raise ValueError(
                f"data differ from the checkpoint's: {parts}; restore them, "
                "or start at their first sample with --data.resume fresh"
            )
        if not differing:
            self.position, self._epoch_start = state_dict["position"], state_dict["epoch_start"]

    def _order_identity(self) -> dict[str, Any]:
        """All that determines the order of samples, of plain types."""
        sets = self.used.splits["train"]
        shards = [shard.sha256 for s in sets for shard in s.shards]
        return {
            "shards": hashlib.sha256(" ".join(shards).encode()).hexdigest()[:16],
            "seed": self.seed,
            "seq_len": self.seq_len,
            "packing": self.packing,
            "weights": None if self.weights is None else {s.name: float(self.weights[s.name]) for s in sets},
        }


def check_weights(weights: dict[str, float], names: list[str], where: str) -> None:
    """Raises ValueError where `weights` name another set than `names`, or are no mixture of millionths."""
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise ValueError(f"data.weights: no training set {unknown[0]!r} in {where}; it has {', '.join(names)}")
    bad = {name: w for name, w in weights.items() if not (math.isfinite(w) and w >= 0)}
    if bad or not any(weights.values()):
        raise ValueError(f"data.weights must be finite, not negative and not all zero, got {bad or weights}")
    for (name, weight), quota in zip(weights.items(), quotas_of(list(weights.values())), strict=True):
        if weight > 0 and quota == 0:
            raise ValueError(f"data.weights: {name!r} has less than one in a million; raise it or leave the set out")


class _Position(pl.Callback):
    """Counts samples as their optimizer step completes, and sets Lightning's counters right after a resume."""

    def __init__(self, data: TokenData) -> None:
        self._data = data
        self._step = 0  # global step at the end of the last micro-step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data = self._data
        self._step = trainer.global_step
        data._pending = 0
        if trainer.global_step > 0 and data.position == 0 and not data._has_resumed and data.resume == "exact":
            raise ValueError(
                "the checkpoint holds no position in the data; start at the first sample with --data.resume fresh"
            )
        if data._has_resumed:
            self._align(trainer)
            data._has_resumed = False

    def _align(self, trainer: pl.Trainer) -> None:
        """Sets the micro-steps of the current epoch to whole optimizer steps of today's size.

        Lightning saves a count of micro-steps, which is another one under another micro-batch, rank count or
        accumulation, and after a save within an accumulation window counts micro-steps whose gradients are lost.
        """
        progress = trainer.fit_loop.epoch_loop.batch_progress
        limit = trainer.fit_loop.max_batches
        accumulate = trainer.accumulate_grad_batches
        if progress.is_last_batch:
            done = limit
            self._data._epoch_start = self._data.position
        else:
            steps = (self._data.position - self._data._epoch_start) // self._data.step_samples
            done = min(steps * accumulate, limit)
        current = progress.current
        behind = current.ready - current.completed  # 1 in a checkpoint saved at the end of a micro-step
        current.ready = current.started = current.processed = done
        current.completed = done - behind

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._data._epoch_start = self._data.position

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        data = self._data
        data._pending += data.batch_size * data.shard()[1]
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            data.position += data._pending
            data._pending = 0
