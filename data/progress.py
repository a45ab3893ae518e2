"""Progress bars: one over all input of `prepare`, one over the bytes of shards that are checked or copied."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Item = TypeVar("Item")


class PrepareProgress:
    """Progress of `prepare`. On something that is no terminal it prints one line at the end."""

    def __init__(self, total_bytes: int) -> None:
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("prepare"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[documents]:,} documents  {task.fields[tokens]:,} tokens"),
            TextColumn("{task.fields[rate]:.1f} MB of text/s"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_bytes, documents=0, tokens=0, rate=0.0)
        self._started = time.monotonic()
        self.text_bytes = 0  # of this run, decompressed

    def skip(self, position: int) -> None:
        """What an interrupted run had done, on the way to where it stopped."""
        self._progress.update(self._task, completed=position)

    def update(self, position: int, text_bytes: int, counts: dict) -> None:
        self.text_bytes += text_bytes
        seconds = max(time.monotonic() - self._started, 1e-3)
        rate = self.text_bytes / seconds / 1e6
        fields = {"documents": counts["documents"], "tokens": counts["tokens"], "rate": rate}
        self._progress.update(self._task, completed=position, **fields)

    def __enter__(self) -> "PrepareProgress":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
        seconds = time.monotonic() - self._started
        if exc[0] is None and not self.console.is_terminal:
            rate = self.text_bytes / max(seconds, 1e-3) / 1e6
            self.console.print(
                f"tokenized {self.text_bytes / 1e6:.1f} MB in {seconds:.1f} s, {rate:.1f} MB/s", highlight=False
            )


def each(what: str, items: Sequence[Item], work: Callable[[Item], object], sizes: Sequence[int], threads: int) -> None:
    """Does `work` on each item in threads, under a bar over their bytes; the first item's error in order is raised.

    Args:
        what: shown before the bar.
        sizes: bytes of each item.
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=sum(sizes))
        with ThreadPoolExecutor(max(1, threads)) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future, size in zip(futures, sizes, strict=True):
                    future.result()
                    progress.advance(task, size)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # the rest is of no use
                raise
