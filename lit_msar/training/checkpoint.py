"""Checkpoints of a run: every N optimizer steps, the newest k kept, and one at the end."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class Checkpoint(ModelCheckpoint):
    """Writes `OUT/checkpoints/step=N.ckpt`, keeps the newest ones, and points `last.ckpt` to the newest.

    Args:
        every_n_steps: optimizer steps between two checkpoints.
        keep_last: how many of them stay; -1 for all.
    """

    def __init__(self, every_n_steps: int = 1000, keep_last: int = 2) -> None:
        if every_n_steps < 1:
            raise ValueError(f"checkpoint.every_n_steps must be at least 1, got {every_n_steps}")
        if keep_last < -1 or keep_last == 0:
            raise ValueError(f"checkpoint.keep_last must be -1 (all) or at least 1, got {keep_last}")
        super().__init__(
            filename="{step}",
            monitor="step",
            mode="max",
            save_top_k=keep_last,
            save_last="link",
            every_n_train_steps=every_n_steps,
            save_on_train_epoch_end=False,
        )

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Nothing: a checkpoint is written before the evaluation of its step, never after."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """The end of the run, if its step was not due anyway."""
        if self._last_global_step_saved == trainer.global_step:
            return
        candidates: dict[str, Any] = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)
