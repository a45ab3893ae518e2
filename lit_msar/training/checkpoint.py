"""Checkpoints of a run: every N optimizer steps, at the end, and when a signal asks the run to stop."""

import json
import platform
from concurrent.futures import Future
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback

from lit_msar.errors import StopTraining
from lit_msar.training import saves
from lit_msar.training.interruption import Interrupted, Interruption
from lit_msar.training.module import LanguageModel
from lit_msar.training.result import commit
from lit_msar.training.strategy import FullyShard


class Checkpoint(CheckpointCallback):
    """Writes `OUT/checkpoints/step=N.ckpt` whole or not at all, and points `last.ckpt` to the newest.

    A file of an unsharded run, a directory of a sharded one. SIGTERM and SIGUSR1 save when the step ends, and stop.

    Args:
        every_n_steps: optimizer steps between two checkpoints.
        keep_last: how many of the newest stay; -1 for all.
        keep_every: those of every so many steps stay as well; null for none.
        sigterm_grace: after SIGTERM, a rank whose step does not end within this ends without saving (seconds);
            launchers kill after 30.
        save: false writes none, for runs that only measure.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        keep_last: int = 2,
        keep_every: int | None = None,
        sigterm_grace: float = 25.0,
        save: bool = True,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"checkpoint.every_n_steps must be at least 1, got {every_n_steps}")
        if keep_last < -1 or keep_last == 0:
            raise ValueError(f"checkpoint.keep_last must be -1 (all) or at least 1, got {keep_last}")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"checkpoint.keep_every must be at least 1 or null, got {keep_every}")
        self.every_n_steps, self.keep_last, self.keep_every = every_n_steps, keep_last, keep_every
        self.sigterm_grace, self.writes = sigterm_grace, save
        self._interruption: Interruption | None = None
        self._writing: Future | None = None
        self._manifest: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------ when

    def on_train_start(self, trainer: L.Trainer, module: LanguageModel) -> None:
        self._saved_step = self._seen_step = trainer.global_step
        watch = getattr(trainer.strategy, "watch", None)
        # here and no earlier: Lightning sets its own handlers, which save inside of them, just before
        self._interruption = Interruption(self.sigterm_grace, lambda: watch is not None and watch.has_failed)
        self._interruption.listen()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: LanguageModel, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when due: before the step's evaluation, which may fail or be cut short."""
        step = trainer.global_step
        if step == self._seen_step:
            return  # inside an accumulation window
        self._seen_step = step
        self._raise_if_writing_failed()
        # over gloo where the strategy has it: there hosts wait for hosts, and none for its GPU
        device = torch.device("cpu") if isinstance(trainer.strategy, FullyShard) else trainer.strategy.root_device
        signal_number = self._interruption.agreed(device)
        if step % self.every_n_steps == 0 or step == trainer.max_steps or signal_number:
            self.save(trainer)
        if signal_number and step < trainer.max_steps:
            self._wait()
            saved = "is saved; go on with --ckpt_path last" if self.writes else "is not saved, as checkpoint.save=false"
            raise Interrupted(f"stopped by signal {signal_number} after step {step}, which {saved}", signal_number)

    def on_train_end(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """The end of a run that stopped before its last step, by its own wish."""
        if self._saved_step != trainer.global_step:
            self.save(trainer)
        self._wait()
        trainer.strategy.barrier()

    def on_exception(self, trainer: L.Trainer, module: LanguageModel, exception: BaseException) -> None:
        self.teardown(trainer, module, "fit")
        if isinstance(exception, StopTraining):
            self._wait()  # all ranks stop here: the save that is being written will be whole

    def teardown(self, trainer: L.Trainer, module: LanguageModel, stage: str) -> None:
        if self._interruption is not None:
            self._interruption.close()
            self._interruption = None

    # ------------------------------------------------------------------------------------------ how

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint of this step on all ranks; asynchronously if the strategy does."""
        if not self.writes:
            return
        self._wait()
        final = saves.save_path(Path(trainer.default_root_dir) / "checkpoints", trainer.global_step)
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            final.parent.mkdir(parents=True, exist_ok=True)
            for leftover in saves.unfinished(final.parent):
                saves.remove(leftover)
        trainer.save_checkpoint(saves.unfinished_path(final), weights_only=False)
        writing = trainer.strategy.take_writing() if isinstance(trainer.strategy, FullyShard) else None
        if writing is None:
            if trainer.is_global_zero:
                self._finish(final, self._manifest)
            trainer.strategy.barrier()
            return
        done, manifest = Future(), self._manifest

        def finish(writing: Future) -> None:
            try:
                writing.result()
                if trainer.is_global_zero:
                    self._finish(final, manifest)
            except Exception as error:  # to be raised in the main thread
                done.set_exception(error)
            else:
                done.set_result(None)

        self._writing = done
        writing.add_done_callback(finish)

    def _finish(self, final: Path, manifest: dict[str, Any]) -> None:
        saves.finish(final, manifest)
        saves.prune(final.parent, self.keep_last, self.keep_every, keep=final)

    def _wait(self) -> None:
        """Until the asynchronous save is complete on disk, as far as this rank does it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _raise_if_writing_failed(self) -> None:
        if self._writing is not None and self._writing.done():
            self._wait()

    def on_save_checkpoint(self, trainer: L.Trainer, module: LanguageModel, checkpoint: dict[str, Any]) -> None:
        self._manifest = checkpoint["manifest"] = manifest_of(trainer, module)


def manifest_of(trainer: L.Trainer, module: LanguageModel) -> dict[str, Any]:
    """What made a checkpoint, in plain values: the run's config, versions, commit, and the place in the data."""
    config = Path(trainer.default_root_dir) / "config.yaml"
    manifest = {
        "format": 1,
        "step": trainer.global_step,
        "tokens": module.tokens_seen,
        "data": trainer.datamodule.state_dict(),
        "model": asdict(module.spec),
        "config": yaml.safe_load(config.read_text()) if config.is_file() else None,
        "ranks": trainer.world_size,
        "versions": {
            "lit_msar": _version("lit_msar"),
            "torch": torch.__version__,
            "lightning": L.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
    }
    return json.loads(json.dumps(manifest))  # plain values: torch's version is a class of its own


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
