"""A progress bar over optimizer steps: loss, tokens per second, remaining time."""

import sys
import time

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from lit_msar.training.monitor import Monitor

LINE_SECONDS = 10.0
"""Without a terminal a line is printed at most this often."""


class StepProgress(ProgressBar):
    """Progress over the whole run in optimizer steps; one line every ten seconds where the output is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = -LINE_SECONDS

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._first_step, self._started = trainer.global_step, time.perf_counter()
        self._console = Console(file=sys.stderr)
        if self._enabled and self._console.is_terminal:
            self._start(trainer.max_steps, trainer.global_step, "train")

    def _start(self, total: int | None, completed: int, name: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), TextColumn("left"), Remaining(), console=self._console)
        self._progress.start()
        self._task = self._progress.add_task(name, total=total, completed=completed, note="")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        note = self._note(trainer)
        if self._progress is not None:
            self._progress.update(self._task, completed=trainer.global_step, note=note)
            return
        now = time.perf_counter()
        is_last = trainer.global_step == trainer.max_steps
        if note and (now - self._last_line >= LINE_SECONDS or is_last) and trainer.global_step > self._first_step:
            self._last_line = now
            done = trainer.global_step - self._first_step
            left = (now - self._started) / done * (trainer.max_steps - trainer.global_step)
            print(f"step {trainer.global_step}/{trainer.max_steps}  {note}  left {left:,.0f} s", file=sys.stderr)

    def _note(self, trainer: L.Trainer) -> str:
        latest = next((c.latest for c in trainer.callbacks if isinstance(c, Monitor)), {})
        parts = []
        if "train/loss" in latest:
            parts.append(f"loss {latest['train/loss']:.3f}")
        if "val/loss" in trainer.callback_metrics:
            parts.append(f"val {trainer.callback_metrics['val/loss']:.3f}")
        if "speed/tokens_per_second" in latest:
            parts.append(f"{latest['speed/tokens_per_second']:,.0f} tokens/s")
        return "  ".join(parts)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._stop()
