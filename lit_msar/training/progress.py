"""A progress bar over optimizer steps, or over the batches of an evaluation: rate and remaining time."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lit_msar.training.monitor import Monitor

LINE_SECONDS = 10.0
"""Without a terminal a line is printed at most this often."""


class Bar:
    """One task: a rich bar on a terminal, elsewhere a line every ten seconds and at the end.

    Args:
        name: what is done.
        unit: what is counted, in lines.
        total: how many there are.
        done: how many are done already.
    """

    def __init__(self, name: str, unit: str, total: int, done: int = 0) -> None:
        self._unit, self._total, self._first = unit, total, done
        self._latest = self._printed = (done, "")
        self._started, self._last_line = time.perf_counter(), -LINE_SECONDS
        self._rich: Progress | None = None
        console = Console(file=sys.stderr)
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._rich = Progress(*columns, TextColumn("{task.fields[note]}"), *times, console=console)
            self._rich.start()
            self._task = self._rich.add_task(name, total=total, completed=done, note="")

    def update(self, done: int, note: str) -> None:
        """Show that `done` of the total are done."""
        if self._rich is not None:
            self._rich.update(self._task, completed=done, note=note)
            return
        self._latest = done, note
        if done > self._first and time.perf_counter() - self._last_line >= LINE_SECONDS:
            self._print()

    def _print(self) -> None:
        self._last_line, self._printed = time.perf_counter(), self._latest
        done, note = self._latest
        left = (self._last_line - self._started) / (done - self._first) * (self._total - done)
        print(f"{self._unit} {done}/{self._total}  {note}  left {left:,.0f} s", file=sys.stderr)

    def stop(self) -> None:
        """Leave the bar as it is; without a terminal print how far it came."""
        if self._rich is not None:
            self._rich.stop()
        elif self._latest != self._printed and self._latest[0] > self._first:
            self._print()


class StepProgress(ProgressBar):
    """`fit`: loss, tokens per second and remaining time over the whole run. Evaluations: batches."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Bar | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def _start(self, *args: Any) -> None:
        if self._enabled:
            self._bar = Bar(*args)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._start("train", "step", trainer.max_steps, trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        note = _training_note(trainer)
        if self._bar is not None and note:
            self._bar.update(trainer.global_step, note)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._start("validate", "batch", _count(trainer.num_val_batches))

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        done = args[3] + 1
        if self._bar is None or trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            total = _count(trainer.num_val_batches)
            self._bar.update(trainer.global_step, f"{_training_note(trainer)}  validating {done}/{total}")
        else:
            self._bar.update(done, "")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._stop()
        elif self._bar is not None and not trainer.sanity_checking:
            self._bar.update(trainer.global_step, _training_note(trainer))

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._start("test", "batch", _count(trainer.num_test_batches))

    def on_test_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(args[3] + 1, "")

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop()

    def on_predict_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._start("predict", "batch", _count(trainer.num_predict_batches))

    def on_predict_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(args[3] + 1, "")

    def on_predict_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop()


def _count(batches: Sequence[int | float]) -> int:
    return int(sum(batches))


def _training_note(trainer: L.Trainer) -> str:
    """Newest loss, validation loss and rate; empty before the first logged step."""
    latest = next((c.latest for c in trainer.callbacks if isinstance(c, Monitor)), {})
    parts = []
    if "train/loss" in latest:
        parts.append(f"loss {latest['train/loss']:.3f}")
    # not trainer.callback_metrics: they lie on the device, and this is asked in every step
    if "val/loss" in (evaluated := trainer.lightning_module.evaluated):
        parts.append(f"val {evaluated['val/loss']:.3f}")
    if "speed/tokens_per_second" in latest:
        parts.append(f"{latest['speed/tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)
